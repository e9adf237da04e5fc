"""uvicorn's HTTP protocol with bounds on a connection.

They bound what a connection may send besides bodies, the time it may take for that, and how long it is read from and
written to after its request is answered. Bodies have their bounds in `middleware`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ridgeline.serving.errors import BadRequest, RequestFailed, TimedOut
from ridgeline.serving.http.errors import error_of

LARGEST_HEAD = 64 << 10  # bytes of a request besides its body: line, headers, heads of chunks, trailers
MOST_FIELDS = 256  # headers and trailers
CHUNK_SHARE = 16  # a body may have 1/16 of its size in heads of chunks beyond LARGEST_HEAD
MOST_AHEAD = 64  # requests that a connection may send ahead of their answers
PIECE = 16 << 10  # bytes parsed between two looks at these bounds
HEAD_TIMEOUT = 30.0  # seconds for a head, from the first byte or, on a new connection, from its beginning
LINGER_TIME = 30.0  # seconds for which the rest of a refused request is read and dropped
LINGER_BYTES = 128 << 20  # bytes of that rest
UNREAD_TIME = 90.0  # seconds that a client may leave unread what was written
PRESENCE = 0.05  # seconds until a client that ended its side is looked at; each further wait is twice as long
MOST_PRESENCE = 1.0
BODY_HEADERS = (b"content-length", b"transfer-encoding")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
TCP_CLOSED = 7  # the number of that state in the kernel


class HeadTooLarge(BadRequest):
    status, code = 431, "headers_too_large"


class _Refused(Exception):
    """Raised within the parser's calls to stop it."""


class _Transport:
    """A transport whose `close` is left to the protocol."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport, self.close = transport, close
        self.write, self.abort = transport.write, transport.abort
        self.leaving = False

    def is_closing(self) -> bool:
        return self.leaving or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedProtocol(HttpToolsProtocol):
    """A protocol that counts what a message brings: bytes that are no body (`_extra`), bytes of the body (`_body`) and
    header fields. A trailer is counted as a header and then dropped, because nothing here reads trailers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begun = self._in_head = False  # of the message being read; both are False between two messages
        self._completed = False  # True if a message was completed within this piece
        self._extra = self._body = self._before = self._fields = self._dropped = 0
        self._failure: RequestFailed | None = None  # why the parser was stopped
        self._late: asyncio.TimerHandle | None = None  # when a head is too late
        # how long to wait for a client that reads nothing, or that goes on sending
        self._patience: asyncio.TimerHandle | None = None
        self._presence: asyncio.TimerHandle | None = None

    # ---- the connection ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._connection = transport
        self._gentle = _Transport(transport, self._close)
        super().connection_made(self._gentle)  # type: ignore[arg-type]
        self._late = self.loop.call_later(HEAD_TIMEOUT, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        for name in ("_late", "_patience", "_presence"):
            self._stop(name)
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection (True). A client may end its side and still read the answers to its requests."""
        waits = self.cycle is not None and not self.cycle.response_complete
        if self._gentle.leaving or self._begun or not waits or self.scheme == "https":
            return False
        self.cycle.keep_alive = False
        self._look_for_client()
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._patience is None:
            self._patience = self.loop.call_later(UNREAD_TIME, self._connection.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self._gentle.leaving:
            self._stop("_patience")

    def shutdown(self) -> None:
        if self._gentle.leaving:
            self._connection.abort()
        else:
            super().shutdown()

    # ---- what comes -------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._gentle.leaving:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                self._connection.abort()
            return
        for start in range(0, len(data), PIECE):
            self._parse(data[start : start + PIECE])
            if self.transport.is_closing():
                return

    def _parse(self, piece: bytes) -> None:
        self._completed, self._before = False, self._body
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            # no other protocol is spoken: this request is answered as it is, and none after it
            self.cycle.keep_alive = False
        except httptools.HttpParserError:
            self._end(self._failure or BadRequest("the request is not valid HTTP; check its line and headers."))
            return
        if self._begun and not self._completed:  # otherwise part of the piece belonged to another message
            self._extra += len(piece) - (self._body - self._before)
            if self._extra > LARGEST_HEAD + self._body // CHUNK_SHARE:
                self._end(self._too_large())

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MOST_AHEAD:
            raise _Refused
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._begun = self._in_head = True
        self._extra = self._body = self._before = self._fields = 0
        if self._late is None:  # a connection's first request has its timer already
            self._late = self.loop.call_later(HEAD_TIMEOUT, self._give_up)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        if self._fields > MOST_FIELDS:
            self._failure = self._too_large()
            raise _Refused
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop("_late")
        if self.parser.should_upgrade() and any(name in BODY_HEADERS for name, _ in self.headers):
            self._failure = BadRequest("a request with a body cannot ask for another protocol; send no Upgrade header.")
            raise _Refused  # the parser would read no body
        super().on_headers_complete()  # raises where the path is none
        self._in_head = False

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._begun, self._completed = False, True
        super().on_message_complete()

    # ---- how it ends ------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._begun and not self._in_head and self.cycle.response_complete:
            self.transport.close()  # the rest of a request that is answered already is not read

    def _give_up(self) -> None:
        self._late = None
        if self._begun:
            self._end(TimedOut(f"the request's headers were not complete after {HEAD_TIMEOUT:g} s."))
        else:
            self._connection.close()  # nothing was asked

    def _too_large(self) -> HeadTooLarge:
        return HeadTooLarge(
            f"what the request has besides its body (headers, heads of chunks, trailers) is longer than {LARGEST_HEAD} "
            f"bytes or {MOST_FIELDS} fields; send less."
        )

    def _end(self, failure: RequestFailed) -> None:
        """Send the failure, unless the answer to an earlier request is on its way, and close the connection."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        # then the cycle belongs to the message at fault
        reading = self._begun and not self._in_head and not self.pipeline
        if reading and not cycle.response_started:
            cycle.disconnected, cycle.response_complete = True, True  # the app neither hears nor says anything more
            cycle.message_event.set()
        if cycle is None or cycle.response_complete:
            content = msgspec.json.encode(error_of(failure))
            head = f"HTTP/1.1 {failure.status} \r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            self.transport.close()
        else:
            self._gentle.leaving = True
            self._connection.close()

    def _close(self) -> None:
        """Close the connection as soon as what was written is read.

        In the middle of a request the client is heard for a moment more. The kernel resets a connection that has
        something unread, so a client that is cut off while sending might lose the answer.
        """
        if self._gentle.leaving:
            return
        self._gentle.leaving = True
        self._stop("_patience")
        if self._begun and not self._connection.is_closing():
            self.flow.resume_reading()
            if self._connection.can_write_eof():
                self._connection.write_eof()
        else:
            self._connection.close()
        self._patience = self.loop.call_later(LINGER_TIME, self._connection.abort)

    # ---- clients that ended their side ------------------------------------------------------------------------

    def _look_for_client(self) -> None:
        """Find out if the client has only ended its side or is gone.

        A client that is gone resets the connection as soon as something is sent. Before an answer an interim response
        serves for that, which every client of HTTP/1.1 can read.
        """
        cycle = self.cycle
        if not cycle.response_started and cycle.scope["http_version"] == "1.1" and not self.pipeline:
            self.transport.write(CONTINUE)
        self._look(PRESENCE)

    def _look(self, pause: float) -> None:
        if _is_reset(self._connection):
            self._connection.abort()
        else:
            self._presence = self.loop.call_later(pause, self._look, min(2 * pause, MOST_PRESENCE))

    def _stop(self, name: str) -> None:
        timer: asyncio.TimerHandle | None = getattr(self, name)
        if timer is not None:
            timer.cancel()
            setattr(self, name, None)


def _is_reset(transport: asyncio.Transport) -> bool:
    """Return True if the kernel's own state says that the connection was reset. A transport is not read any more once
    its client has ended its side, so it learns nothing."""
    if not hasattr(socket, "TCP_INFO"):
        return False
    try:
        return bool(
            transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSED
        )
    except OSError:  # a connection that is not TCP
        return False
