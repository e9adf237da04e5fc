"""uvicorn's HTTP protocol, with bounds on what comes before a request can be refused: the size of its head, and the
time until that is complete. A connection that says nothing, or never comes to the point, is not kept."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ridgeline.serving.errors import BadRequest, RequestFailed, TimedOut
from ridgeline.serving.http.errors import error_body

LARGEST_HEAD = 64 << 10  # bytes of a request's line and headers
HEAD_TIMEOUT = 30.0  # seconds for them, from the first byte or, on a new connection, from its beginning


class HeadTooLarge(BadRequest):
    status, code = 431, "headers_too_large"


class BoundedProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head: int | None = 0  # bytes so far of the head that is being read; None within a body
        self._begun = False  # some of it has come
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expected()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._head += len(data)
        super().data_received(data)
        if self._head is not None and self._head > LARGEST_HEAD:
            self._end(HeadTooLarge(f"the request's headers are longer than {LARGEST_HEAD} bytes; send less."))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun = True
        if self._late is None:  # not the connection's first
            self._head = 0
            self._expect()

    def on_headers_complete(self) -> None:
        self._head, self._begun = None, False
        self._expected()
        super().on_headers_complete()

    def _expect(self) -> None:
        self._late = self.loop.call_later(HEAD_TIMEOUT, self._give_up)

    def _expected(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        if self._begun:
            self._end(TimedOut(f"the request's headers were not complete after {HEAD_TIMEOUT:g} s."))
        else:
            self.transport.close()  # nothing was asked

    def _end(self, failure: RequestFailed) -> None:
        """Say why, unless the answer to an earlier request is on its way, and close the connection."""
        if not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                content = msgspec.json.encode(error_body(failure))
                head = f"HTTP/1.1 {failure.status} \r\ncontent-type: application/json\r\nconnection: close\r\n"
                self.transport.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            self.transport.close()
