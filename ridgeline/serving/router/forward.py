"""One request's way through the router: to a worker, and its answer back as it comes.

Where no connection could be made, nothing was begun, and another worker is tried. A request that was sent is never sent
again: its worker may have begun it.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncIterator

import httpcore
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from ridgeline.core.settings.routing import ANSWER_BYTES
from ridgeline.serving.errors import BadRequest, RequestFailed, TimedOut
from ridgeline.serving.http.exchange import ClientGone, while_connected
from ridgeline.serving.http.middleware import BodyTooLarge, paced
from ridgeline.serving.router import asked as reading
from ridgeline.serving.router.asked import Asked
from ridgeline.serving.router.budget import ByteBudget
from ridgeline.serving.router.events import WholeEvents
from ridgeline.serving.router.headers import to_client, to_server
from ridgeline.serving.router.paths import model_in, response_in, target
from ridgeline.serving.router.workers import Worker, Workers
from ridgeline.serving.trace_parent import SANE_ID

NOT_CONNECTED = (httpcore.ConnectError, httpcore.ConnectTimeout)
BROKEN = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException)
STORED_ID = re.compile(rb'"id"\s*:\s*"(resp[A-Za-z0-9_-]{1,120})"')
MOST_HOMES = 1 << 16  # stored responses whose worker is known, about 16 MB
LOOKED_AT = 4096  # bytes of an answer that may name it


class WorkerLost(RequestFailed):
    status, kind, code = 502, "service_unavailable", "worker_lost"


class HeldBytes:
    """A body and the bytes that a request holds in the budget, until its worker has it."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget, self._held = budget, 0
        self.pieces: list[bytes] = []
        self.size = 0
        self.asked = Asked()

    def take(self, size: int) -> None:
        self._budget.take(size)
        self._held += size

    def add(self, piece: bytes) -> None:
        self.take(len(piece))
        self.pieces.append(piece)
        self.size += len(piece)

    def whole(self) -> bytes:
        """Return the body in one piece, which takes the place of its pieces."""
        body = self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)
        self.pieces = [body]
        return body

    def note(self, asked: Asked) -> None:
        """Keep what routing read of the body."""
        self.take(len(asked.prompt))
        self.asked = asked

    def drop_body(self) -> None:
        size = self.size + len(self.asked.prompt)
        self._budget.give(size)
        self._held -= size
        self.pieces, self.size, self.asked = [], 0, self.asked._replace(prompt=b"")

    def drop(self) -> None:
        self.pieces = []
        self._budget.give(self._held)
        self._held = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in list(self.pieces):
            yield piece


class Forwarder:
    """Passes requests on. `ending` is the failure that open requests get when the router ends, once it is set."""

    def __init__(self, workers: Workers, budget: ByteBudget) -> None:
        self._workers, self._budget, self._config = workers, budget, workers.config
        self._homes: OrderedDict[str, int] = OrderedDict()  # stored responses, and the number of their worker
        self.ending: RequestFailed | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raise RequestFailed before the answer began."""
        where = target(scope["method"], scope["path"], scope.get("query_string", b""))
        held = HeldBytes(self._budget)
        try:
            held.take(ANSWER_BYTES)
            if not await self._read_body(receive, held):
                return
            await while_connected(receive, self._forward(scope, send, where, held))
        except ClientGone:
            return
        finally:
            held.drop()

    async def _read_body(self, receive: Receive, held: HeldBytes) -> bool:
        """Read the body within its bounds of size and time. Return False if the client left."""
        most = self._config.max_body_bytes
        pull = paced(
            receive, most, BodyTooLarge(f"the body is longer than {most} bytes (--max-body-bytes); send less.")
        )
        more = True
        while more:
            message = await pull()
            if message["type"] == "http.disconnect":
                return False
            if piece := message.get("body", b""):
                held.add(piece)
            more = message.get("more_body", False)
        return True

    async def _forward(self, scope: Scope, send: Send, where: bytes, held: HeldBytes) -> None:
        held.note(await self._asked(scope, held))
        home = self._homes.get(response_in(scope["path"]) or held.asked.previous)
        tried: list[Worker] = []
        while True:
            worker = self._workers.choose(held.asked, home, tried)
            worker.chosen += 1
            try:
                return await _Exchange(self, worker, scope, send).run(where, held)
            except NOT_CONNECTED as error:
                worker.lost(f"it takes no connection ({error})")
                worker.errors["connect"] += 1
                tried.append(worker)
                self._workers.retries += 1

    async def _asked(self, scope: Scope, held: HeldBytes) -> Asked:
        headers = Headers(scope=scope)
        session = headers.get(self._config.session_header, "")[: reading.LONGEST]
        asked = await reading.read(held.whole(), session) if held.size else Asked(session=session, tokens=0)
        if SANE_ID.fullmatch(asked.request_id) and not SANE_ID.fullmatch(headers.get("x-request-id", "")):
            scope["state"]["request_id"] = asked.request_id
        return asked if asked.model else asked._replace(model=model_in(scope["path"]))

    def note_home(self, answer: bytes, worker: Worker) -> None:
        """Note which worker has a response that its answer names."""
        if (found := STORED_ID.search(answer)) is not None:
            self._homes[found[1].decode()] = worker.number
            while len(self._homes) > MOST_HOMES:
                self._homes.popitem(last=False)


class _Exchange:
    """A request at one worker."""

    def __init__(self, forwarder: Forwarder, worker: Worker, scope: Scope, send: Send) -> None:
        self._forwarder, self._worker, self._scope, self._send = forwarder, worker, scope, send
        self._begun = False  # the head of the answer went out
        self._whole = WholeEvents(b"")

    async def run(self, where: bytes, held: HeldBytes) -> None:
        """Send the request and pass its answer on. Raise one of NOT_CONNECTED where nothing was begun, and
        RequestFailed where the answer had not begun. A later failure becomes part of the answer, if that is
        a stream of events."""
        worker, tokens = self._worker, held.asked.tokens
        try:
            async with asyncio.timeout(None) as end:
                worker.open.add(end)
                worker.tokens += tokens
                try:
                    await self._exchange(where, held)
                finally:
                    worker.open.discard(end)
                    worker.tokens -= tokens
        except NOT_CONNECTED:
            raise
        except TimeoutError:
            worker.errors["ended"] += 1
            hung = TimedOut(
                f"the server did not answer for {self._forwarder._config.hung_timeout:g} s, and may have hung."
            )
            await self._failed(self._forwarder.ending or hung)
        except BROKEN as error:
            if isinstance(error, httpcore.LocalProtocolError) and not self._begun:  # nothing of it was sent
                raise BadRequest(f"a header of the request is not valid HTTP ({error}); send it plainly.") from error
            worker.errors["stream" if self._begun else "lost"] += 1
            worker.look.set()
            when = (
                "before it answered; it may have begun the request, so it was not sent again"
                if not self._begun
                else ("while it answered; what had come is not complete")
            )
            await self._failed(WorkerLost(f"the server behind the router was lost {when} ({type(error).__name__})."))

    async def _exchange(self, where: bytes, held: HeldBytes) -> None:
        scope, worker = self._scope, self._worker
        client, state = scope.get("client") or ("",), scope["state"]
        length = held.size if held.size or scope["method"] == "POST" else -1
        headers = to_server(scope["headers"], worker.host, state["request_id"], client[0], length)
        content = held if length > 0 else None
        response = await worker.pool.handle_async_request(
            worker.request(scope["method"].encode(), where, headers, content)
        )
        try:
            held.drop_body()
            if response.status == 503:
                worker.look.set()
            await self._answer(response)
        finally:
            await response.aclose()

    async def _answer(self, response: httpcore.Response) -> None:
        headers = to_client(response.headers)
        kinds = [value for name, value in headers if name == b"content-type"]
        encoded = any(name == b"content-encoding" for name, _ in headers)
        self._whole = WholeEvents(kinds[0] if kinds and not encoded else b"")
        if self._whole.in_events:  # it may end with one more
            headers = [(name, value) for name, value in headers if name != b"content-length"]
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})
        self._begun = True
        looks_for = self._scope["path"] == "/v1/responses" and response.status == 200
        async for piece in response.aiter_stream():
            if looks_for:
                self._forwarder.note_home(piece[:LOOKED_AT], self._worker)
                looks_for = False
            if data := self._whole.add(piece):
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
        await self._send({"type": "http.response.body", "body": self._whole.rest(), "more_body": False})

    async def _failed(self, failure: RequestFailed) -> None:
        if not self._begun:
            raise failure
        event = self._whole.failed(failure, self._scope)
        if event is not None:
            await self._send({"type": "http.response.body", "body": event, "more_body": True})
            last: Message = {"type": "http.response.body", "body": b"", "more_body": False}
            await self._send(last)
        # otherwise the answer stays incomplete, and uvicorn closes the connection: the client sees that it broke off
