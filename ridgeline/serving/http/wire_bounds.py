"""uvicorn's HTTP protocol, with bounds on what a connection may send besides bodies, on the time it may take for that,
and on how long it is heard and written to once its request is answered. Bodies have their bounds in `middleware`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ridgeline.serving.errors import BadRequest, RequestFailed, TimedOut
from ridgeline.serving.http.errors import error_body

LARGEST_HEAD = 64 << 10  # bytes of a request besides its body: line, headers, heads of chunks, trailers
MOST_FIELDS = 256  # headers and trailers
CHUNK_SHARE = 16  # a body may come with 1/16 of its size more in heads of chunks
MOST_AHEAD = 64  # requests that a connection may send ahead of their answers
PIECE = 16 << 10  # bytes parsed between two looks at these bounds
HEAD_TIMEOUT = 30.0  # seconds for a head, from the first byte or, on a new connection, from its beginning
LINGER_TIME = 30.0  # seconds for which the rest of a refused request is read and dropped
LINGER_BYTES = 128 << 20  # of it
UNREAD_TIME = 90.0  # seconds that a client may leave unread what was written
PRESENCE = 0.05  # seconds until a client that ended its side is looked at, and twice as long each further time
MOST_PRESENCE = 1.0
BODY_HEADERS = (b"content-length", b"transfer-encoding")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
TCP_CLOSED = 7  # of the kernel's states of a connection


class HeadTooLarge(BadRequest):
    status, code = 431, "headers_too_large"


class _Refused(Exception):
    """Ends the parser's work, from within one of its calls."""


class _Transport:
    """A transport whose `close` is the protocol's business."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport, self.close = transport, close
        self.write, self.abort = transport.write, transport.abort
        self.leaving = False

    def is_closing(self) -> bool:
        return self.leaving or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedProtocol(HttpToolsProtocol):
    """Protocol that counts, of the message being read, bytes that are no body (`_extra`), bytes of the body (`_body`)
    and header fields. A trailer is counted as a header is, and dropped: nothing here reads them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begun = self._in_head = False  # of the message being read; both False between two
        self._completed = False  # a message was, within this piece
        self._extra = self._body = self._before = self._fields = self._dropped = 0
        self._failure: RequestFailed | None = None  # why the parser was stopped
        self._late: asyncio.TimerHandle | None = None  # for a head
        self._patience: asyncio.TimerHandle | None = None  # with a client that reads nothing, or goes on sending
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
        """A client may end its side of the connection, and still read the answers to what it asked (True)."""
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
            self.cycle.keep_alive = False  # to nothing that is spoken here: it is answered as it is, and none after it
        except httptools.HttpParserError:
            self._end(self._failure or BadRequest("the request is not valid HTTP; check its line and headers."))
            return
        if self._begun and not self._completed:  # else some of the piece was another message's
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
        if self._late is None:  # not the connection's first
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
            self.transport.close()  # answered before it was read, and so is not read

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
        """Say why, unless the answer to an earlier request is on its way, and close the connection."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        reading = self._begun and not self._in_head and not self.pipeline  # then the cycle is of the message at fault
        if reading and not cycle.response_started:
            cycle.disconnected, cycle.response_complete = True, True  # nothing more is heard from, nor said by, the app
            cycle.message_event.set()
        if cycle is None or cycle.response_complete:
            content = msgspec.json.encode(error_body(failure))
            head = f"HTTP/1.1 {failure.status} \r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            self.transport.close()
        else:
            self._gentle.leaving = True
            self._connection.close()

    def _close(self) -> None:
        """Close as soon as what was written is read. In the middle of a request the client is heard for a moment more:
        who is cut while sending may lose the answer, for the kernel resets a connection with something unread."""
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
        """Find out if it has only ended its side or is gone, which shows as soon as something is sent: who is gone
        resets the connection. Before an answer an interim response serves for that, which every client of HTTP/1.1 can
        read."""
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
    """By the kernel's own state: a transport whose client ended its side is read no more, and learns nothing."""
    if not hasattr(socket, "TCP_INFO"):
        return False
    try:
        return bool(
            transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSED
        )
    except OSError:  # of another kind than TCP
        return False
