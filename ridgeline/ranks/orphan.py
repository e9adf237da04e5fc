"""The end of a rank whose leader is gone, from the rank's first moment on. It imports nothing that takes time."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import threading
import time

GONE = 1  # exit code of a rank whose leader is gone
LOOK = 1.0  # seconds between checks of the parent's id


def end_with_leader(leader: int, lifeline: int) -> None:
    """Let this process end when the leader, its parent with this number, is gone.

    lifeline: an end of a pipe whose other end the leader holds and never writes to. When that closes the kernel kills
        this process, whether its interpreter is busy in a library, or it is stopped.

    A process that the leader forked may hold the other end as well, so a thread looks at the parent's number too.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    closed = select.poll()
    closed.register(lifeline, 0)  # 0: nothing but that the other end is gone
    if closed.poll(0):  # before the kernel knew which process to signal
        os._exit(GONE)
    threading.Thread(target=_watch, args=(leader,), daemon=True).start()


def _watch(leader: int) -> None:
    while os.getppid() == leader:
        time.sleep(LOOK)
    os._exit(GONE)
