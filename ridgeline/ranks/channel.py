"""A connection between the leader and one rank: frames over a pair of sockets that no other process can open."""

from __future__ import annotations

import select
import socket
import struct
from threading import Lock

HEADER = struct.Struct("<Q")  # the bytes of the frame that follows
LARGEST = 1 << 32  # bytes of a frame; a longer one is no frame of ours
AT_ONCE = 1 << 20


class Closed(Exception):
    """Raised when the other end is gone."""


class Channel:
    """One end. Any thread may send; only one may receive.

    limit: seconds that the other end may leave what is sent unread. None sets no limit.
    """

    def __init__(self, end: socket.socket, limit: float | None) -> None:
        end.setblocking(False)  # a socket's timeout would be that of all threads, so each waits for itself
        self._socket, self._limit = end, limit
        self._lock = Lock()
        self._received = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """Send a frame. Raise Closed."""
        left = memoryview(HEADER.pack(len(frame)) + frame)
        with self._lock:
            while left:
                try:
                    left = left[self._socket.send(left) :]
                except BlockingIOError:
                    if not self._wait(select.POLLOUT, self._limit):
                        raise Closed from None
                except OSError as error:
                    raise Closed from error

    def receive(self, wait: float | None) -> bytes | None:
        """Return the next frame, or None if none comes within so many seconds. None waits for ever. Raise Closed."""
        while (frame := self._next()) is None:
            try:
                data = self._socket.recv(AT_ONCE)
            except BlockingIOError:
                if not self._wait(select.POLLIN, wait):
                    return None
                continue
            except OSError as error:
                raise Closed from error
            if not data:
                raise Closed
            self._received += data
        return frame

    def _wait(self, event: int, seconds: float | None) -> bool:
        """Wait until the socket is ready for more, or the other end is gone. Return False if that takes too long."""
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(None if seconds is None else 1000 * seconds))

    def _next(self) -> bytes | None:
        """Return a frame that has arrived whole."""
        if len(self._received) < HEADER.size:
            return None
        [size] = HEADER.unpack_from(self._received)
        if size > LARGEST:
            raise Closed
        end = HEADER.size + size
        if len(self._received) < end:
            return None
        frame = bytes(self._received[HEADER.size : end])
        del self._received[:end]
        return frame

    def close(self) -> None:
        self._socket.close()
