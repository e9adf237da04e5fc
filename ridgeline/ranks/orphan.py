"""The end of a rank whose leader is gone, from the rank's first moment on. It imports nothing that takes time."""

from __future__ import annotations

import os
import select
import threading

GONE = 1  # exit code of a rank whose leader is gone
LOOK = 1000  # milliseconds between looks at who the parent is


def end_with_leader(descriptor: int) -> None:
    """Let this process end when the leader, its parent, is gone. descriptor: this end of their pair of sockets.

    The other end may live on in a process that the leader forked, so the parent's number is looked at as well.
    """
    threading.Thread(target=_watch, args=(descriptor, os.getppid()), daemon=True).start()


def _watch(descriptor: int, leader: int) -> None:
    closed = select.poll()
    closed.register(descriptor, select.POLLRDHUP)  # what was sent before that stays unread
    while not closed.poll(LOOK) and os.getppid() == leader:
        pass
    os._exit(GONE)
