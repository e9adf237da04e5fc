"""Server-sent events, as OpenAI's clients read them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ridgeline.serving.errors import RequestFailed
from ridgeline.serving.http.errors import error_body, failure_of, response_for
from ridgeline.serving.http.exchange import ClientGone, while_connected

KEEP_ALIVE = 15.0  # seconds without data after which a comment shows proxies that the connection lives
STALLED = 60.0  # seconds that one write may wait for a client that reads nothing

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_encode = msgspec.json.Encoder().encode

Write = Callable[[Any], Awaitable[None]]


class EventStream(Response):
    """A stream that runs `produce(write)`: each written value becomes an event, and [DONE] comes last.

    Headers go out with the first event. A failure before that is answered with a status of its own, so clients can try
    again. A later failure becomes an event and ends the stream. When the client leaves, `produce` is cancelled.
    """

    def __init__(
        self,
        produce: Callable[[Write], Awaitable[None]],
        *,
        last: bytes = b"data: [DONE]\n\n",
        told: Callable[[RequestFailed], dict[str, Any]] = error_body,
    ) -> None:
        """`last` ends a stream, and `told` is what clients are told of a failure."""
        super().__init__()
        self._produce, self._end, self._told = produce, last, told
        self._started = False
        self._last = 0.0  # when the newest write began
        self._writing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        try:
            await while_connected(receive, self._run())
        except ClientGone:
            return
        except Exception as error:
            if not self._started:
                await response_for(error, self._told)(scope, receive, send)
                return
            await self._put(b"data: " + _encode(self._told(failure_of(error))) + b"\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _run(self) -> None:
        self._last = time.monotonic()
        work = asyncio.ensure_future(self._work())
        try:
            while not (await asyncio.wait({work}, timeout=self._last + KEEP_ALIVE - time.monotonic()))[0]:
                quiet = time.monotonic() - self._last
                if self._writing and quiet > STALLED:
                    raise ClientGone
                if quiet >= KEEP_ALIVE:
                    await self._keep_alive()
            work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _work(self) -> None:
        await self._produce(self._write)
        if self._end:
            await self._put(self._end)

    async def _keep_alive(self) -> None:
        if self._writing:  # the write waits for the client itself
            await asyncio.sleep(1.0)
        else:
            await self._put(b": keep-alive\n\n")

    async def _write(self, value: Any) -> None:
        await self._put(b"data: " + _encode(value) + b"\n\n")

    async def _put(self, data: bytes) -> None:
        self._last, self._writing = time.monotonic(), True
        if not self._started:
            self._started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._writing = False
