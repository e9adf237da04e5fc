"""The two ends of the connection: ZeroMQ over a Unix socket that only this user can open."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import cast

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from ridgeline.transport.messages import (
    FromEngine,
    FromFace,
    decode_from_engine,
    decode_from_face,
    encode,
)

logger = logging.getLogger(__name__)

# bytes of a message to the engine: the longest prompt takes a few MB, and none of our messages takes this many
LARGEST = 64 << 20
AT_ONCE = 10_000  # messages taken before the engine steps again
COMPLAINT_PERIOD = 10.0  # seconds
HELD = 100_000  # messages kept for an API server that does not read; one that is further behind is taken for dead


class EngineSocket:
    """The engine's end: one ROUTER for all API servers, each known by its connection. It is not thread-safe.

    `malformed` counts the messages that were dropped because they are none of ours. Any process that can open the
    socket may send anything.
    """

    def __init__(self, path: str) -> None:
        self.malformed = 0
        self._complain_at = 0.0
        self._socket: zmq.Socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, HELD)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)  # messages sent just before the end still go out
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST)
        self._socket.bind(f"ipc://{path}")

    def receive(self, wait: float) -> list[tuple[bytes, FromFace]]:
        """Return all messages that have come, as (connection, message). Wait up to `wait` seconds for the first."""
        found: list[tuple[bytes, FromFace]] = []
        if wait > 0:
            self._socket.poll(int(1000 * wait))
        for _ in range(AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                connection, body = frames
                found.append((connection, decode_from_face(body)))
            except (ValueError, msgspec.DecodeError, RecursionError) as error:
                self._note_malformed(error)
        return found

    def _note_malformed(self, error: Exception) -> None:
        self.malformed += 1
        if time.monotonic() >= self._complain_at:
            self._complain_at = time.monotonic() + COMPLAINT_PERIOD
            logger.warning(
                "dropped %d messages on the local socket so far that could not be decoded (%s)", self.malformed, error
            )

    def send(self, connection: bytes, message: FromEngine) -> bool:
        """Send a message. Return False if the other end has gone, or does not read."""
        try:
            self._socket.send_multipart((connection, encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


class FaceSocket:
    """An API server's end, to one life of the engine. A message sent to it never reaches the next life."""

    def __init__(self, path: str) -> None:
        self._socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        # Looked at through a socket of its own. To ask the other one for its state would take away the signal by which
        # asyncio learns of messages.
        place = f"inproc://{id(self)}-connections"
        self._socket.monitor(place, zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        self._connections: zmq.Socket = zmq.Context.shadow(self._socket.context.underlying).socket(zmq.PAIR)
        self._connections.setsockopt(zmq.LINGER, 0)
        self._connections.connect(place)
        self._connected = True
        self._socket.connect(f"ipc://{path}")

    @property
    def connected(self) -> bool:
        """False once the engine's end is closed, which a large process does seconds before it is gone."""
        while self._connections.poll(0):
            self._connected = recv_monitor_message(self._connections)["event"] == zmq.EVENT_CONNECTED
        return self._connected

    async def receive(self) -> FromEngine:
        return decode_from_engine(await self._socket.recv())

    def send(self, message: FromFace) -> asyncio.Future[None]:
        """Send a message. The future is done at once if an engine is connected, or else as soon as one is; `close`
        cancels it."""
        return cast("asyncio.Future[None]", self._socket.send(encode(message)))

    def close(self) -> None:
        self._socket.disable_monitor()
        self._connections.close()
        self._socket.close()
