"""A cache of compiled kernels for disks that may be full, and for folders that were filled elsewhere. What cannot be
kept is kept for this process alone."""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import triton
from triton.runtime.cache import FileCacheManager

from ridgeline.core.lacking import lacking

logger = logging.getLogger(__name__)

MEMORY = "/dev/shm"


def keep_without_room(ahead: Path | None = None) -> None:
    """Let Triton compile although its cache has no room. Otherwise the step that needs the kernel would fail.

    ahead: a folder in which kernels are found too. It may have been filled at another place, and is not written to.
    """
    triton.knobs.cache.manager_class = _with_spare(ahead)


def _with_spare(ahead: Path | None) -> type[FileCacheManager]:
    """Return Triton's cache, with a spare folder that is made when it is first needed."""
    spare: list[TemporaryDirectory[str]] = []

    class WithSpare(FileCacheManager):
        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            try:
                super().__init__(key, override, dump)
            except OSError as error:
                self._move(error)

        def get_file(self, filename: str) -> str | None:
            places = (self.cache_dir, *(() if ahead is None else (str(ahead / self.key),)))
            return next((path for place in places if os.path.exists(path := os.path.join(place, filename))), None)

        def get_group(self, filename: str) -> dict[str, str] | None:
            """Return the files of a group beside its index. The index has full paths, of where it was written."""
            with suppress(OSError, ValueError, KeyError):
                if (index := self.get_file(f"__grp__{filename}")) is not None:
                    named, folder = json.loads(Path(index).read_text())["child_paths"], os.path.dirname(index)
                    paths = {name: os.path.join(folder, name) for name in named}
                    return {name: path for name, path in paths.items() if os.path.exists(path)}
            return None

        def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
            try:
                return str(super().put(data, filename, binary))
            except OSError as error:
                self._move(error)
                return str(super().put(data, filename, binary))

        def _move(self, error: OSError) -> None:
            """Use the spare folder from now on. Raise the error if it is no lack of room."""
            if (what := lacking(error)) is None:
                raise error
            if not spare:
                logger.warning("compiled kernels are not kept (%s): %s", what, error)
                place = MEMORY if os.access(MEMORY, os.W_OK) else None
                spare.append(TemporaryDirectory(prefix="ridgeline-", dir=place, ignore_cleanup_errors=True))
            self.cache_dir = os.path.join(spare[0].name, self.key)
            self.lock_path = os.path.join(self.cache_dir, "lock")
            os.makedirs(self.cache_dir, exist_ok=True)

    return WithSpare
