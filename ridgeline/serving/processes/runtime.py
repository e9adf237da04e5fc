"""The directory of a server's sockets, and the removal of directories that killed servers left behind.

A directory belongs to the process that holds a lock on its file `owner`. The kernel releases the lock however that
process ends, so if the lock can be taken, no process uses the directory any more.
"""

from __future__ import annotations

import fcntl
import os
import resource
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from ridgeline.core.errors import InvalidConfig

PREFIX = "ridgeline-"
OWNER = "owner"
SOCKET, TURN = "engine", "turn"
OURS = (SOCKET, TURN, "kept")  # how the names of all our files begin (kept/kept.py)
LONGEST_PATH = 80  # of the directory above, in bytes: a Unix socket's path has at most 107
LEAST_DESCRIPTORS = 128  # an engine opens about sixty, an API server forty and one for each connection


class RuntimeDirectory:
    """A new directory with a short path (`path`) that only this user can enter."""

    def __init__(self) -> None:
        """Make the directory. Raise InvalidConfig if no place allows one."""
        parents = _parents()
        if not parents:
            raise InvalidConfig(
                "there is no directory for sockets; make TMPDIR one that can be written, with a short path."
            )
        for parent in parents:
            sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parents[0]))
        self._lock = _claim(self.path)

    def socket(self, engine: int) -> Path:
        """Return the path of the socket of the engine with this number."""
        return self.path / f"{SOCKET}-{engine}"

    def turn(self, replica: int) -> Path:
        """Return the path of the file that the engines of several models lock in turn (turn.py)."""
        return self.path / f"{TURN}-{replica}"

    def remove(self) -> None:
        _empty(self.path)
        os.close(self._lock)


def sweep(parent: Path) -> None:
    """Remove from `parent` what dead servers of this user left there.

    A directory without `owner` was made by others or is just being made, and one that holds other files than ours
    stays.
    """
    with suppress(OSError):
        for entry in list(os.scandir(parent)):
            if entry.name.startswith(PREFIX) and _left_behind(Path(entry.path)):
                _empty(Path(entry.path))


def _claim(path: Path) -> int:
    """Return the locked file. It gets its name once it is locked, so no process sees it unlocked."""
    new = path / "new"
    descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    os.rename(new, path / OWNER)
    return descriptor


def _left_behind(path: Path) -> bool:
    """Return True for a real directory of this user with a lock that no process holds."""
    with suppress(OSError):
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(directory).st_uid != os.getuid():
                return False
            owner = os.open(OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
            try:
                if not stat.S_ISREG(os.fstat(owner).st_mode):
                    return False
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            finally:
                os.close(owner)
        finally:
            os.close(directory)
    return False


def _empty(path: Path) -> None:
    """Remove our own files, and the directory if nothing else is in it. Links are removed and not followed."""
    with suppress(OSError):
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            ours = [name for name in os.listdir(directory) if name.startswith(OURS)]
            for name in (*ours, OWNER):
                with suppress(OSError):
                    os.unlink(name, dir_fd=directory)
        finally:
            os.close(directory)
        os.rmdir(path)


def _parents() -> list[Path]:
    """Return the places where such directories may be, the best first."""
    wanted = dict.fromkeys((os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"))
    return [
        Path(parent)
        for parent in wanted
        if parent and len(parent.encode()) <= LONGEST_PATH and os.access(parent, os.W_OK | os.X_OK)
    ]


def allow_descriptors() -> None:
    """Allow as many open files as this user may have, because each connection takes one and the usual bound is 1024.

    Raise InvalidConfig if these are too few for a server.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < LEAST_DESCRIPTORS:
        raise InvalidConfig(
            f"this user may open {most} files at once, and a server needs at least {LEAST_DESCRIPTORS}, besides one "
            "for each connection; raise the limit (ulimit -n)."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
