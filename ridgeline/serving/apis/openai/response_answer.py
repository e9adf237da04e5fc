"""An answer of /v1/responses: whole, streamed, or written in the background, and what is kept of it."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from msgspec.json import encode
from starlette.responses import Response

from ridgeline.core.plan.request import BACKGROUND
from ridgeline.serving import owner
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.openai.conversation import Conversation
from ridgeline.serving.apis.openai.response_bodies import NAMES, ResponsesBody
from ridgeline.serving.apis.openai.response_items import Output, Scores
from ridgeline.serving.apis.openai.response_tools import known_by, offered
from ridgeline.serving.errors import BadRequest, Overloaded, RequestFailed
from ridgeline.serving.generation.pieces import Piece
from ridgeline.serving.generation.service import GenerationRequest, Run
from ridgeline.serving.http import answers, shapes
from ridgeline.serving.http.answers import ResponseEvent
from ridgeline.serving.http.errors import failure_of
from ridgeline.serving.http.pieces import json_response
from ridgeline.serving.http.sse import NamedEvents, Write, named_event, nowhere
from ridgeline.serving.kept.store import Log, Record
from ridgeline.serving.requests.translation import named
from ridgeline.serving.requests.validation import check_model
from ridgeline.serving.shares import INLINE_ENTRIES, off_loop
from ridgeline.text.parsers.events import CallDelta, Content, Reasoning

PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "additional_tools": "at",
}
ENDED = ("completed", "incomplete", "failed", "cancelled")


class ResponseNotFound(BadRequest):
    status, code = 404, "response_not_found"


class Answer:
    """The answer to one request: whole, streamed, or written in the background."""

    def __init__(
        self, api: ApiServer, body: ResponsesBody, asked: GenerationRequest, conversation: Conversation
    ) -> None:
        self._api, self._body, self.asked = api, body, asked
        self.name = api.kept.new_name()
        key = self.name.removeprefix("resp_")
        self._items = [_with_id(item, f"{key}_i{index}") for index, item in enumerate(conversation.items)]
        self._before = conversation.before
        self._store = api.kept.keeps and body.store is not False
        self._model, self._created = check_model(api, body.model), int(time.time())
        self._output = Output(key, known_by(offered(body.tools or [], conversation.known)))
        scored = asked.params.logprobs is not None
        self._scores = Scores(api.tokenizer, body.top_logprobs or 0) if scored else None
        self._tenant, self._owner = owner.tenant(), owner.current()
        self._status: answers.ResponseStatus = "in_progress"
        self._error: answers.ResponseError | None = None
        self._run: Run | None = None
        self._ended_at: int | None = None
        self._count = 0  # events so far

    async def whole(self) -> Response:
        await self._write(nowhere)
        assert self._run is not None
        return await json_response(shapes.entries([self._run]), self._told)

    async def stream(self, write: Write) -> None:
        try:
            await self._write(write)
        except Exception as error:
            if not self._count:  # the failure has a status of its own
                raise
            await self._fail(error, write)

    async def begin(self) -> Response:
        """Begin to write the answer in the background, and return it as it is, or follow its events."""
        if not self._store:
            message = "background needs a server that stores answers (--max-stored-responses); leave it out."
            raise BadRequest(message, param="background")
        self.asked = dataclasses.replace(self.asked, priority=BACKGROUND)  # no client waits for it
        self._status, begun = "queued", asyncio.get_running_loop().create_future()
        log = Log() if self._body.stream else None
        record = Record(self.name, self._tenant, self._owner, self._encoded(), background=True, log=log)
        items = await off_loop(len(self.asked.prompt_token_ids), INLINE_ENTRIES, lambda: encode(self._items))
        record.turns = (*self._before, items)
        record.task = asyncio.create_task(self._work(record, begun))
        try:
            self._api.kept.store.add(record)
        except Overloaded:
            record.task.cancel()
            raise
        with named(NAMES):
            await begun
        if log is not None:
            return NamedEvents(events(self._api, self.name, 0))
        return Response(record.body, media_type="application/json")

    # ---- in the background ------------------------------------------------------------------------------------

    async def _work(self, record: Record, begun: asyncio.Future[None]) -> None:
        """Write the answer into the record. `begun` is done once it runs, or fails as it does."""
        store, log = self._api.kept.store, record.log

        async def write(event: ResponseEvent) -> None:
            if event.type in ("response.in_progress", "response.output_item.done"):
                record.body = self._encoded()
                store.update(record)
            if log is not None and not log.forgotten:
                log.events.append(named_event(event))
                store.update(record, len(log.events[-1]))
                log.changed()

        try:
            await self._write(write, begun)
        except asyncio.CancelledError:
            self._status = "cancelled"
            if self._output.items:
                list(self._output.end("incomplete"))
        except Exception as error:
            if not begun.done():
                store.remove(record)
                begun.set_exception(error)
                return
            await self._fail(error, write)
        finally:
            if not begun.done():
                begun.cancel()
            record.task, record.body = None, self._encoded()
            record.turns = (*record.turns, encode(self._output.items))
            if log is not None:
                log.ended = True
                log.changed()
            store.update(record)

    # ---- events -----------------------------------------------------------------------------------------------

    async def _write(self, write: Write, begun: asyncio.Future[None] | None = None) -> None:
        """Run the request and write its events."""
        async with self._api.service.run(self.asked) as run:
            self._run = run
            if begun is not None:
                begun.set_result(None)
                await self._note("created", write)
                await self._note("queued", write)
            async for piece in run.pieces(by_token=self._scores is not None):
                if self._status == "queued" or not self._count:
                    self._status = "in_progress"
                    if begun is None:
                        await self._note("created", write)
                    await self._note("in_progress", write)
                for told in self._told_of(piece):
                    await self._put(told, write)
            cut = shapes.finish_reason(run.result.outputs[0]) == "length"
        for told in self._output.end("incomplete" if cut else "completed"):
            await self._put(told, write)
        await self._end("incomplete" if cut else "completed", write)

    def _told_of(self, piece: Piece) -> Iterator[ResponseEvent]:
        """Yield the events that tell of a piece, those of text with the logprobs of its tokens."""
        scores = self._scores
        if scores is not None:
            scores.add(piece)
        for event in piece.events:
            found = scores.take(event.text) if scores is not None and not isinstance(event, CallDelta) else None
            if not (isinstance(event, Reasoning) and self._body.include_reasoning is False):
                yield from self._output.take(event, found if isinstance(event, Content) else None)

    async def _fail(self, error: Exception, write: Write) -> None:
        """Tell of a failure on the way."""
        failure = failure_of(error)
        self._error = answers.ResponseError(code=_code(failure), message=failure.message)
        for told in self._output.end("incomplete") if self._output.items else ():
            await self._put(told, write)
        await self._end("failed", write)

    async def _end(self, status: answers.ResponseStatus, write: Write) -> None:
        self._status, self._ended_at = status, int(time.time())
        if self._store and not self._body.background and status != "failed":
            await self._keep()
        await self._note(status, write)

    async def _keep(self) -> None:
        """Keep the answer before its end is sent, because the next request may come at once."""

        def work() -> tuple[bytes, bytes, bytes]:
            return self._encoded(), encode(self._items), encode(self._output.items)

        assert self._run is not None
        body, items, output = await off_loop(shapes.entries([self._run]), INLINE_ENTRIES, work)
        turns = (*self._before, items, output)
        self._api.kept.store.add(Record(self.name, self._tenant, self._owner, body, turns))

    async def _note(self, kind: str, write: Write) -> None:
        await self._put(ResponseEvent(type=f"response.{kind}", response=self._told()), write)

    async def _put(self, event: ResponseEvent, write: Write) -> None:
        event.sequence_number = self._count
        await write(event)
        self._count += 1

    # ---- the answer as it is ----------------------------------------------------------------------------------

    def _encoded(self) -> bytes:
        return encode(self._told())

    def _told(self) -> answers.ResponseAnswer:
        body, params, status = self._body, self.asked.params, self._status
        form = None if body.text is None or body.text.format is None else body.text.format
        text = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
        effort = body.reasoning.effort if body.reasoning else None
        return answers.ResponseAnswer(
            id=self.name,
            created_at=self._created,
            completed_at=self._ended_at if status == "completed" else None,
            status=status,
            background=bool(body.background),
            error=self._error,
            incomplete_details=answers.IncompleteDetails() if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self._model,
            output=list(self._output.items),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning=answers.ResponseReasoning(effort=effort),
            store=self._store,
            temperature=params.temperature,
            text={"format": text},
            tool_choice="auto" if body.tool_choice is None else body.tool_choice,
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=params.top_p,
            truncation=body.truncation or "disabled",
            usage=self._usage() if status in ENDED else None,
        )

    def _usage(self) -> answers.ResponseUsage | None:
        if self._run is None:
            return None
        usage = self._run.usage
        return answers.ResponseUsage(
            input_tokens=usage.prompt,
            input_tokens_details=answers.InputTokensDetails(cached_tokens=usage.cached),
            output_tokens=usage.completion,
            output_tokens_details=answers.CompletionTokensDetails(reasoning_tokens=usage.reasoning),
            total_tokens=usage.prompt + usage.completion,
        )


def _with_id(item: dict[str, Any], key: str) -> dict[str, Any]:
    """Return an item with an id and a type, by which it can be listed and referred to."""
    kind = item.get("type", "message")
    prefix = PREFIXES.get(kind, "fco")
    told = {"type": kind, "id": f"{prefix}_{key}", **{name: value for name, value in item.items() if value is not None}}
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        told["content"] = [{"type": part, "text": item["content"]}]
    return told


def _code(failure: RequestFailed) -> str:
    """Return the code of a failure on the way, in OpenAI's words."""
    if failure.status < 500 and failure.status != 429:
        return "invalid_prompt"
    return "rate_limit_exceeded" if failure.status == 429 else "server_error"


def events(api: ApiServer, name: str, start: int) -> Callable[[Write], Awaitable[None]]:
    """Return the function that writes the events of an answer in the background, from `start` on, as they come."""
    tenant = owner.tenant()

    async def follow(write: Write) -> None:
        place = start
        while True:
            found = await api.kept.events(name, tenant, place)
            if found is None or found.forgotten:
                raise ResponseNotFound("the events of this response are no longer kept; ask for it whole.")
            for event in found.events:
                await write(event)
            place += len(found.events)
            if found.ended:
                return

    return follow
