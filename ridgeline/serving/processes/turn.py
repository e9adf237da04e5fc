"""The turn of an engine on devices that the engines of several models share.

Only one of them has its model in the devices' memory at a time: the one that holds the lock on a file. The kernel
releases the lock however that engine ends, so no other waits for a dead one.
"""

from __future__ import annotations

import fcntl
import os
import time

LOOK = 0.01  # seconds between tries


class Turn:
    """A turn. Without a path there is no other engine, and the turn is always this one's."""

    def __init__(self, path: str | None = None) -> None:
        self._file = None if path is None else os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @property
    def shared(self) -> bool:
        """True if other models take turns with this one."""
        return self._file is not None

    def wait(self, told: Turn) -> None:
        """Take the turn as soon as it is free. Until then this process holds `told`, by which others see that it
        waits."""
        told._lock()  # others look for a moment only
        self._lock()
        told.give()

    def take(self, seconds: float) -> bool:
        """Take the turn, and return True, unless another has it for so long."""
        deadline = time.monotonic() + seconds
        while self._file is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(LOOK)
        return True

    def _lock(self) -> None:
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def give(self) -> None:
        """Let another take the turn."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @property
    def free(self) -> bool:
        """True if no engine has the turn. Not for a process that may have it itself."""
        if not self.take(0):
            return False
        self.give()
        return True


def waits(socket: str) -> str:
    """Return the path of the file that an engine locks while it waits for its turn to load its model."""
    return f"{socket}-waits"
