"""A cache of compiled kernels for disks that may be full. What cannot be kept there is kept for this process alone."""

from __future__ import annotations

import logging
import os
from tempfile import TemporaryDirectory

import triton
from triton.runtime.cache import FileCacheManager

from ridgeline.core.lacking import lacking

logger = logging.getLogger(__name__)

MEMORY = "/dev/shm"


def keep_without_room() -> None:
    """Let Triton compile although its cache has no room. Otherwise the step that needs the kernel would fail."""
    triton.knobs.cache.manager_class = _with_spare()


def _with_spare() -> type[FileCacheManager]:
    """Return Triton's cache, with a spare folder that is made when it is first needed."""
    spare: list[TemporaryDirectory[str]] = []

    class WithSpare(FileCacheManager):
        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            try:
                super().__init__(key, override, dump)
            except OSError as error:
                self._move(error)

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
