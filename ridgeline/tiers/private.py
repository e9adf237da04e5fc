"""A directory that only its owner can read or write, and the files in it.

All files are opened by a name relative to the directory's descriptor and without following links, so a path
that is changed meanwhile leads nowhere else.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ridgeline.core.errors import InvalidConfig

LOCK = "lock"
LOCK_SECONDS = 2.0  # that the directory's lock is waited for; it is held for some milliseconds
LOCK_PAUSE = 0.005
OTHERS = stat.S_IRWXG | stat.S_IRWXO


class NotPrivate(OSError):
    """A file in the directory that is a link, not a file, or open to other users."""


class LockBusy(OSError):
    """The directory's lock was held for too long."""


class PrivateDirectory:
    """A directory with mode 0700 that belongs to this user, made if `make` and there is none.

    Raises InvalidConfig, with one sentence, if it is missing, a link, another user's, or open to others.
    """

    def __init__(self, path: Path, *, make: bool = True) -> None:
        self.path = path
        try:
            if make:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            link = " (it is a link)" if path.is_symlink() else ""
            raise InvalidConfig(
                f"the KV cache's directory {path}{link} cannot be used: {error.strerror}; name another."
            ) from error
        found = os.fstat(self.descriptor)
        if found.st_uid != os.geteuid():
            self.close()
            raise InvalidConfig(
                f"the KV cache's directory {path} belongs to user {found.st_uid}, not to {os.geteuid()}; "
                "name one of your own, since it holds conversations."
            )
        if found.st_mode & OTHERS:
            self.close()
            raise InvalidConfig(
                f"the KV cache's directory {path} is open to other users (mode {stat.S_IMODE(found.st_mode):04o}), "
                f"and it holds conversations; run `chmod 700 {path}` or name another."
            )

    def close(self) -> None:
        os.close(self.descriptor)

    def names(self) -> list[str]:
        return sorted(os.listdir(self.descriptor))

    def files(self) -> list[str]:
        """Return the names of what is no directory."""
        with os.scandir(self.descriptor) as found:
            return sorted(each.name for each in found if not each.is_dir(follow_symlinks=False))

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Return a descriptor of a file with mode 0600. Raise NotPrivate for anything else, OSError as `os.open`."""
        try:
            descriptor = os.open(
                name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600, dir_fd=self.descriptor
            )
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
                raise NotPrivate(f"{self.path / name} is not a private file (mode 0600) of this user") from error
            raise
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & OTHERS:
            os.close(descriptor)
            raise NotPrivate(f"{self.path / name} is not a private file (mode 0600) of this user")
        return descriptor

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def size(self, name: str) -> int:
        """Return a file's bytes; 0 if it is gone."""
        try:
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_size
        except FileNotFoundError:
            return 0

    def changed(self, name: str) -> int:
        """Return when a file changed, in ns; 0 if there is none."""
        try:
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mtime_ns
        except FileNotFoundError:
            return 0

    def touch(self, name: str) -> None:
        """Let a file, made if it is not there, have changed now."""
        descriptor = self.open(name, os.O_RDWR | os.O_CREAT)
        os.utime(descriptor)
        os.close(descriptor)

    def read(self, name: str, most: int) -> bytes:
        descriptor = self.open(name)
        try:
            return os.read(descriptor, most)
        finally:
            os.close(descriptor)

    def create(self, name: str, content: bytes) -> None:
        """Write a small file, which appears with all of its content or not at all."""
        draft = f"{name}.new"
        self.remove(draft)
        descriptor = self.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            os.write(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self.rename(draft, name)
        os.fsync(self.descriptor)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory's lock, which processes take in turn. Raise LockBusy if it is not free in some seconds."""
        descriptor = self.open(LOCK, os.O_RDWR | os.O_CREAT)
        try:
            end = time.monotonic() + LOCK_SECONDS
            while not try_lock(descriptor):
                if time.monotonic() > end:
                    raise LockBusy(f"{self.path / LOCK} is held by another process")
                time.sleep(LOCK_PAUSE)
            yield
        finally:
            os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Take a file's lock, which ends with the descriptor or its process. Return False while another has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
