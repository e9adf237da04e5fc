"""Streams: server-sent events, as OpenAI's clients read them, and lines of JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import msgspec
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ridgeline.serving.http.answers import Answer, ErrorAnswer, MessageEvent
from ridgeline.serving.http.errors import body_for, failure_of, response_for
from ridgeline.serving.http.exchange import STALLED, ClientGone, while_connected

KEEP_ALIVE = 15.0  # seconds without data after which a comment shows proxies that the connection lives

HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

_encode = msgspec.json.Encoder().encode

Write = Callable[[Any], Awaitable[None]]


async def nowhere(value: object) -> None:
    """Write nothing: the `write` of an answer that is not streamed."""


class EventStream(Response):
    """A stream that runs `produce(write)`: each written value becomes an event, and [DONE] comes last.

    Headers go out with the first event. A failure before that is answered with a status of its own, so clients can try
    again. A later failure becomes an event and ends the stream. When the client leaves, `produce` is cancelled.

    `kind` is the type of the content, `end` what comes last, and `quiet` what shows that the connection lives.
    """

    kind: ClassVar[bytes] = b"text/event-stream; charset=utf-8"
    end: ClassVar[bytes] = b"data: [DONE]\n\n"
    quiet: ClassVar[bytes] = b": keep-alive\n\n"

    def __init__(self, produce: Callable[[Write], Awaitable[None]]) -> None:
        super().__init__()
        self._produce = produce
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
                await response_for(error, scope)(scope, receive, send)
                return
            await self._put(self.failed(body_for(failure_of(error), scope)))
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
        if self.end:
            await self._put(self.end)

    async def _keep_alive(self) -> None:
        if self._writing:  # the write waits for the client itself
            await asyncio.sleep(1.0)
        else:
            await self._put(self.quiet)

    def event(self, value: Any) -> bytes:
        """Return the event for a value."""
        return b"data: " + _encode(value) + b"\n\n"

    def failed(self, body: Answer) -> bytes:
        """Return the event for a failure on the way, by the body that it would have had before."""
        return self.event(body)

    async def _write(self, value: Any) -> None:
        await self._put(self.event(value))

    async def _put(self, data: bytes) -> None:
        self._last, self._writing = time.monotonic(), True
        if not self._started:
            self._started = True
            headers = [(b"content-type", self.kind), *HEADERS]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._writing = False


class PlainEvents(EventStream):
    """A stream that ends without a word."""

    end: ClassVar[bytes] = b""


def named_event(value: Any) -> bytes:
    """Return an event that is named by the value's own type."""
    return b"event: " + value.type.encode() + b"\ndata: " + _encode(value) + b"\n\n"


class NamedEvents(PlainEvents):
    """A stream whose events have names. Its last event says that it ends. Bytes are events as they go out."""

    def event(self, value: Any) -> bytes:
        return value if isinstance(value, bytes) else named_event(value)

    def failed(self, body: Answer) -> bytes:
        return self.event(replace(body.error, type="error") if isinstance(body, ErrorAnswer) else body)


class MessageEvents(NamedEvents):
    """Anthropic's streams."""

    quiet: ClassVar[bytes] = named_event(MessageEvent(type="ping"))


class Lines(PlainEvents):
    """A stream of lines, each of which is one value's JSON. A blank stands before the next one while nothing comes."""

    kind: ClassVar[bytes] = b"application/x-ndjson"
    quiet: ClassVar[bytes] = b" "

    def event(self, value: Any) -> bytes:
        return _encode(value) + b"\n"
