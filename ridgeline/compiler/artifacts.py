"""Machine code of kernels in a folder, by the structure of the kernel and the target it is for.

A key is the digest of a kernel's text and of its target, so 32 equal layers have one entry, and a folder filled on a
machine with a compiler serves machines without one. A file begins with a line of JSON that says what it is and the
digest of the code behind it: a damaged or foreign file counts as none. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.kernels.base.user_cache import user_cache

FORMAT = 1  # of files, and of what lowering makes of a text: a change of either gets another number
MOST_BYTES = 64 << 20  # of a file; kernels have some 10 KB


@dataclass(frozen=True)
class KernelArtifact:
    """Machine code and what its header says beside: names and numbers that its launcher needs."""

    code: bytes
    header: Mapping[str, Any]


def artifact_key(target: str, text: str) -> str:
    """Return the key of a kernel's text for a target."""
    return hashlib.sha256(repr((FORMAT, target, text)).encode()).hexdigest()[:32]


class ArtifactStore:
    """Folders of artifacts: all are searched in order, and the first is written to (by the user alone).

    hits, misses: how often an artifact was found or not.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self.hits = self.misses = 0

    def get(self, key: str) -> KernelArtifact | None:
        """Return an artifact, or None if there is none that is whole."""
        for folder in self.folders:
            found = _read(folder / f"{key}.kernel", key)
            if found is not None:
                self.hits += 1
                return found
        self.misses += 1
        return None

    def put(self, key: str, code: bytes, header: Mapping[str, Any]) -> KernelArtifact:
        """Keep machine code, and return it as an artifact. Where the folder cannot be written it is not kept."""
        whole = {**header, "format": FORMAT, "key": key, "bytes": len(code), "sha256": _digest(code)}
        if self.folders:
            with suppress(OSError):
                folder = self.folders[0]
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as scratch:
                    file = Path(scratch) / key
                    file.write_bytes(json.dumps(whole, sort_keys=True).encode() + b"\n" + code)
                    os.replace(file, folder / f"{key}.kernel")  # others see all of it or nothing
        return KernelArtifact(code, whole)


def default_store() -> ArtifactStore:
    """Return the store of this user's cache folder; without a home nothing is kept."""
    try:
        return ArtifactStore([user_cache() / "compiler"])
    except RuntimeError:
        return ArtifactStore([])


def _digest(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()


def _read(file: Path, key: str) -> KernelArtifact | None:
    try:
        with open(file, "rb", opener=_opened) as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                return None
            whole = opened.read(MOST_BYTES + 1)
        if len(whole) > MOST_BYTES:
            return None
        line, _, code = whole.partition(b"\n")
        header = json.loads(line)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(header, dict) or header.get("format") != FORMAT or header.get("key") != key:
        return None
    return KernelArtifact(code, header) if header.get("sha256") == _digest(code) else None


def _opened(file: str, flags: int) -> int:
    """Open a file without waiting for the other end of a pipe."""
    return os.open(file, flags | os.O_NONBLOCK)
