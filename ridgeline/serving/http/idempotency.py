"""The header `Idempotency-Key`: a POST that is repeated within a minute, because its client got no answer, is not run
again.

It gets the recorded answer, piece by piece if that is a stream, and waits for the parts that are not there yet.
Failures of the server are not recorded, because the client wants to try those again. Each API server has its own
memory.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from hashlib import sha256

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.serving.errors import BadRequest, RequestFailed
from ridgeline.serving.http.errors import response_for
from ridgeline.serving.http.exchange import replayed
from ridgeline.serving.requests.bounded_json import INLINE_BYTES
from ridgeline.serving.shares import off_loop

LIFETIME = 60.0  # seconds after the answer's end
MOST_ANSWERS = 1000
MOST_BYTES = 64 << 20  # of all recorded answers
MOST_BYTES_EACH = 4 << 20
LONGEST_KEY = 255

Name = tuple[bytes, str, str]


class KeyReused(BadRequest):
    status, code = 422, "idempotency_key_reused"


class NotKept(RequestFailed):
    """The request ran once, and its answer was not kept."""

    status, kind, code = 409, "invalid_request_error", "idempotent_answer_not_kept"


class Answer:
    """The answer to one request, as ASGI messages. `forgotten` means that it was too large to keep, `done` that it is
    complete, and `broken` that it never will be."""

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.messages: list[Message] = []
        self.size = 0
        self.done = self.broken = self.forgotten = False
        self.ended = float("inf")
        self._changed = asyncio.Event()

    def changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        await self._changed.wait()

    def forget(self) -> None:
        self.messages, self.size, self.forgotten = [], 0, True
        self.changed()

    @property
    def worth_keeping(self) -> bool:
        """True if the answer is complete and no failure of the server, which may come as late as in the middle of a
        stream."""
        if not self.done or self.broken:
            return False
        if self.forgotten:
            return True
        status = self.messages[0]["status"]
        failed = any(m.get("body", b"").startswith(b'data: {"error"') for m in self.messages)
        return not failed and status < 500 and status not in (408, 429, 499)


class Memory:
    """The answers of the last minute, oldest first, within the bounds above."""

    def __init__(self) -> None:
        self._answers: OrderedDict[Name, Answer] = OrderedDict()
        self._size = 0

    def find(self, name: Name) -> Answer | None:
        self._drop_old()
        return self._answers.get(name)

    def begin(self, name: Name, digest: bytes) -> Answer:
        answer = self._answers[name] = Answer(digest)
        while len(self._answers) > MOST_ANSWERS:
            self._forget(self._answers.popitem(last=False)[1])
        return answer

    def record(self, answer: Answer, message: Message) -> None:
        if answer.forgotten:
            return
        size = len(message.get("body", b""))
        answer.messages.append(message)
        answer.size += size
        self._size += size
        if answer.size > MOST_BYTES_EACH:
            self._forget(answer)
        if self._size > MOST_BYTES:
            for other in list(self._answers.values()):
                if self._size <= MOST_BYTES:
                    break
                self._forget(other)
        answer.changed()

    def end(self, name: Name, answer: Answer) -> None:
        answer.broken = answer.broken or not answer.done
        answer.ended = time.monotonic()
        if not answer.worth_keeping and self._answers.get(name) is answer:
            del self._answers[name]
            self._size -= answer.size
        answer.changed()

    def _forget(self, answer: Answer) -> None:
        self._size -= answer.size
        answer.forget()

    def _drop_old(self) -> None:
        now = time.monotonic()
        for name in [n for n, answer in self._answers.items() if now - answer.ended > LIFETIME]:
            self._size -= self._answers.pop(name).size


def with_idempotency(app: ASGIApp) -> ASGIApp:
    """Wrap an app that gets the whole body as one message."""
    memory = Memory()

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        key = headers.get("idempotency-key")
        if key is None or scope["method"] != "POST":
            return await app(scope, receive, send)
        if not 0 < len(key) <= LONGEST_KEY:
            failure = BadRequest(f"an Idempotency-Key has 1 to {LONGEST_KEY} characters, not {len(key)}.")
            return await response_for(failure, scope)(scope, receive, send)
        first = await receive()
        who = f"{headers.get('authorization', '')}\n{headers.get('x-api-key', '')}"
        body = first["body"]
        digest = await off_loop(len(body), INLINE_BYTES, lambda: sha256(body).digest())
        name = sha256(who.encode()).digest(), scope["path"], key
        while True:
            answer = memory.find(name)
            if answer is None:
                answer = memory.begin(name, digest)
                return await _lead(app, scope, replayed(first, receive), send, memory, name, answer)
            if answer.digest != digest:
                failure = KeyReused("this Idempotency-Key came with another body before; take a new one.")
                return await response_for(failure, scope)(scope, receive, send)
            if await _follow(answer, scope, receive, send):
                return None

    return run


async def _lead(
    app: ASGIApp, scope: Scope, receive: Receive, send: Send, memory: Memory, name: Name, answer: Answer
) -> None:
    """Run the request and record its answer. If its client leaves, the request ends, as every request does."""

    async def recorded(message: Message) -> None:
        kept = dict(message)
        if kept["type"] == "http.response.start":
            kept["headers"] = list(kept["headers"])  # a copy, because outer layers add to the original
        answer.done = kept["type"] == "http.response.body" and not kept.get("more_body", False)
        memory.record(answer, kept)
        await send(message)

    async def noticed() -> Message:
        message = await receive()
        if message["type"] == "http.disconnect" and not answer.done:
            answer.broken = True  # what still comes is the answer of an aborted request
        return message

    try:
        await app(scope, noticed, recorded)
    finally:
        memory.end(name, answer)


async def _follow(answer: Answer, scope: Scope, receive: Receive, send: Send) -> bool:
    """Repeat a recorded answer and go on as it goes on. Return False if it broke off before anything was passed on:
    then the request must be run again."""
    sent = 0
    while True:
        if answer.forgotten and sent == 0:
            failure = NotKept("a request with this Idempotency-Key has run, and its answer was too long to be kept.")
            await response_for(failure, scope)(scope, receive, send)
            return True
        if answer.broken and sent == 0:
            return False
        if answer.broken or answer.forgotten:
            return True  # broken in the middle: the server closes the connection, so no client takes this for the end
        if sent < len(answer.messages):
            await send(_replayed(answer.messages[sent]))
            sent += 1
        elif answer.done:
            return True
        else:
            await answer.wait()


def _replayed(message: Message) -> Message:
    message = dict(message)
    if message["type"] == "http.response.start":
        message["headers"] = list(message["headers"])
        MutableHeaders(scope=message)["idempotent-replayed"] = "true"
    return message
