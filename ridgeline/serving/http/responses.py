"""The routes of OpenAI's newer API: POST /v1/responses, and what becomes of an answer that is kept.

A request is put into a chat's words (requests/responses.py) and runs as chats do. Answers are kept unless the client
says otherwise, each for its own client (serving/kept/).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serving import owner
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import BadRequest, Overloaded, RequestFailed, TooLong
from ridgeline.serving.generation.service import GenerationRequest, Piece, Run
from ridgeline.serving.http import answers, shapes
from ridgeline.serving.http.describe import answers as answered
from ridgeline.serving.http.describe import described
from ridgeline.serving.http.errors import failure_of
from ridgeline.serving.http.exchange import json_response, read_body, request_id, tell_ignored, while_connected
from ridgeline.serving.http.response_items import Output, Scores, texts_of
from ridgeline.serving.http.sse import NamedEvents, Write, named_event
from ridgeline.serving.kept.kept import NAME, Found
from ridgeline.serving.kept.store import Log, Record
from ridgeline.serving.requests.bodies import ChatBody, ChatMessage
from ridgeline.serving.requests.bounded_json import INLINE_BYTES, Size, decode, off_loop
from ridgeline.serving.requests.reading import parser_for, read_piece
from ridgeline.serving.requests.refusals import shortened
from ridgeline.serving.requests.responses import NAMES, CountBody, ResponsesBody, chat_of, input_items
from ridgeline.serving.requests.translation import INSTRUCTING, later_instructions, named
from ridgeline.serving.requests.validation import chat_request, check_model, encode, render
from ridgeline.text.parsers.events import Content, Event

MOST_REFERENCES = 256  # answers that the items of one request may be found in
ENDED = ("completed", "incomplete", "failed", "cancelled")

Items = list[dict[str, Any]]


class ResponseNotFound(BadRequest):
    status, code = 404, "response_not_found"


class PreviousNotFound(BadRequest):
    code = "previous_response_not_found"


def router(api: ApiServer) -> APIRouter:
    routes = APIRouter(tags=["generation"])

    @routes.post(
        "/v1/responses",
        **described(ResponsesBody, "The next answer", answers.ResponseAnswer, chunk=answers.ResponseEvent),
    )
    async def create(request: Request) -> Response:
        body = await read_body(request, ResponsesBody)
        name = request_id(request, body.request_id)
        with named(NAMES):
            conversation = await Conversation.of(api, body)
            chat, ignored = await conversation.chat(api, body)
            asked = await _fitted(api, body, chat, name)
        if body.store and not api.kept.keeps:
            ignored.append("store")
        tell_ignored(request, ignored)
        answer = Answer(api, body, chat, asked, conversation)
        if body.background:
            return await answer.begin()
        if body.stream:
            return NamedEvents(answer.stream)
        with named(NAMES):
            return await while_connected(request.receive, answer.whole())

    @routes.post("/v1/responses/input_tokens", **described(CountBody, "The length of the prompt", answers.InputTokens))
    async def count(request: Request) -> Response:
        body = await read_body(request, CountBody)
        with named(NAMES):
            check_model(api, body.model)
            chat, ignored = await (await Conversation.of(api, body)).chat(api, body)
            ids = await encode(api, await render(api, chat, use_tools=chat.tool_choice != "none"), False, "messages")
        tell_ignored(request, ignored)
        return await json_response(1, lambda: {"object": "response.input_tokens", "input_tokens": len(ids)})

    @routes.get(
        "/v1/responses/{response_id}", summary="An answer that is kept", responses=answered(answers.ResponseAnswer, 404)
    )
    async def retrieve(
        response_id: str, stream: bool = False, starting_after: int | None = Query(None, ge=0)
    ) -> Response:
        found = _there(await api.kept.find(response_id, owner.tenant()), response_id)
        if not stream:
            if starting_after is not None:
                raise BadRequest("starting_after needs stream to be true.", param="starting_after")
            return Response(found.body, media_type="application/json")
        if not found.streamed:
            raise BadRequest("only an answer made with background and stream can be streamed again.", param="stream")
        start = 0 if starting_after is None else starting_after + 1
        return NamedEvents(_events(api, response_id, start))

    @routes.delete("/v1/responses/{response_id}", summary="Forget it", responses=answered(answers.DeletedResponse, 404))
    async def delete(response_id: str) -> dict[str, Any]:
        _there(await api.kept.delete(response_id, owner.tenant()), response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @routes.post(
        "/v1/responses/{response_id}/cancel",
        summary="End it, if it is written in the background",
        responses=answered(answers.ResponseAnswer, 400, 404),
    )
    async def cancel(response_id: str) -> Response:
        found = _there(await api.kept.cancel(response_id, owner.tenant()), response_id)
        return Response(found.body, media_type="application/json")

    @routes.get(
        "/v1/responses/{response_id}/input_items",
        summary="The items that it was made from",
        responses=answered(answers.ItemList, 404),
    )
    async def items(
        response_id: str,
        limit: int = Query(20, ge=1, le=100),
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        found = _there(await api.kept.find(response_id, owner.tenant()), response_id)
        before = found.turns if found.runs else found.turns[:-1]
        listed = await _decoded(before)
        if order == "desc":
            listed.reverse()
        if after is not None:
            place = next((place for place, item in enumerate(listed) if item.get("id") == after), None)
            if place is None:
                raise BadRequest(f"after names no item of this answer, got {shortened(after)}.", param="after")
            listed = listed[place + 1 :]
        page = listed[:limit]
        ends = (
            {"first_id": page[0].get("id"), "last_id": page[-1].get("id")}
            if page
            else {"first_id": None, "last_id": None}
        )
        content = {"object": "list", "data": page, "has_more": len(listed) > limit, **ends}
        return await json_response(len(page), lambda: content)

    return routes


def _there(found: Found | None, name: str) -> Found:
    if found is None:
        raise ResponseNotFound(
            f"no response {shortened(name)} is kept here: it was never stored, or made room for newer ones.",
            param="response_id",
        )
    return found


async def _decoded(turns: Sequence[bytes]) -> Items:
    """Return the items of some turns, which are bounded together as one body is."""

    def work() -> Items:
        size = Size()
        return [item for turn in turns for item in decode(turn, size)]

    return await off_loop(sum(map(len, turns)), INLINE_BYTES, work)


def _events(api: ApiServer, name: str, start: int) -> Callable[[Write], Awaitable[None]]:
    """Return what writes the events of an answer in the background, from `start` on, as they come."""
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


class Conversation:
    """The conversation that a request goes on from, and what it adds to it.

    before: the turns that are kept, as JSON. items: the request's own. known: both, without references.
    """

    def __init__(self, before: tuple[bytes, ...], items: Items, known: Items) -> None:
        self.before, self.items, self._known = before, items, known

    @classmethod
    async def of(cls, api: ApiServer, body: CountBody) -> Conversation:
        """Return a request's conversation. Raise BadRequest for an earlier answer that is not kept."""
        tenant, before = owner.tenant(), tuple[bytes, ...]()
        previous = body.previous_response_id
        if previous is not None:
            found = await api.kept.find(previous, tenant)
            if found is None:
                raise PreviousNotFound(
                    f"no response {shortened(previous)} is kept here; send the whole conversation as input.",
                    param="previous_response_id",
                )
            if found.runs:
                raise BadRequest(f"the response {previous} is still being written.", param="previous_response_id")
            before = found.turns
            length, most = sum(map(len, before)), api.config.max_body_bytes
            if length > most:
                raise TooLong(
                    f"the conversation before has {length} bytes, of at most {most}; send what matters of it as input.",
                    param="previous_response_id",
                )
        items = await _resolved(api, input_items(body), tenant)
        return cls(before, items, [*await _decoded(before), *items])

    async def chat(self, api: ApiServer, body: CountBody) -> tuple[ChatBody, list[str]]:
        size = sum(map(len, self.before)) + (len(body.input) if isinstance(body.input, (str, list)) else 0)
        later = await later_instructions(api, (item.get("role") for item in self._known[1:]))
        return await off_loop(size, INLINE_BYTES, lambda: chat_of(body, self._known, later=later))


async def _resolved(api: ApiServer, items: Items, tenant: str) -> Items:
    """Return the items with those in place that were only referred to."""
    wanted: dict[str, list[int]] = {}  # by the answer that holds them
    for index, item in enumerate(items):
        if item.get("type") == "item_reference":
            known = NAME.fullmatch(str(item.get("id"))[:64])
            if known is None:
                raise _no_item(item, index)
            wanted.setdefault(f"resp_{known[1]}{known[2]}", []).append(index)
    if len(wanted) > MOST_REFERENCES:
        message = f"input refers to items of {len(wanted)} responses, of at most {MOST_REFERENCES}; send the items."
        raise BadRequest(message, param="input")
    items = list(items)
    for name, indices in wanted.items():
        found = await api.kept.find(name, tenant)
        ended = [] if found is None or found.runs else [found.turns[-1]]
        asked = [] if found is None else found.turns[: len(found.turns) - len(ended)][-1:]
        held = {item.get("id"): item for item in await _decoded([*asked, *ended])}
        for index in indices:
            if items[index]["id"] not in held:
                raise _no_item(items[index], index)
            items[index] = held[items[index]["id"]]
    return items


def _no_item(item: dict[str, Any], index: int) -> BadRequest:
    message = f"input.{index} refers to {shortened(item.get('id'))}, which is not kept here; send the item."
    return BadRequest(message, param=f"input.{index}.id")


async def _fitted(api: ApiServer, body: ResponsesBody, chat: ChatBody, name: str) -> GenerationRequest:
    """Return the request. With truncation "auto" the oldest messages are left out until it fits, from one of a user to
    the next, and instructions stay."""
    try:
        return await chat_request(api, chat, name)
    except TooLong:
        messages = chat.messages
        first = next((i for i, each in enumerate(messages) if each.role not in INSTRUCTING), len(messages))
        cuts = [i for i in range(first + 1, len(messages)) if messages[i].role == "user"]
        if body.truncation != "auto" or not cuts:
            raise
    low, high, best = 0, len(cuts) - 1, None
    while low < high:
        middle = (low + high) // 2
        try:
            best = middle, await chat_request(api, _without(chat, first, cuts[middle]), name)
            high = middle
        except TooLong:
            low = middle + 1
    if best is not None and best[0] == low:
        return best[1]
    return await chat_request(api, _without(chat, first, cuts[low]), name)


def _without(chat: ChatBody, first: int, end: int) -> ChatBody:
    messages: list[ChatMessage] = [*chat.messages[:first], *chat.messages[end:]]
    return chat.model_copy(update={"messages": messages})


class Answer:
    """The answer to one request: whole, streamed, or written in the background."""

    def __init__(
        self, api: ApiServer, body: ResponsesBody, chat: ChatBody, asked: GenerationRequest, conversation: Conversation
    ) -> None:
        self._api, self._body, self._asked = api, body, asked
        self.name = api.kept.new_name()
        key = self.name.removeprefix("resp_")
        self._items = [_with_id(item, f"{key}_i{index}") for index, item in enumerate(conversation.items)]
        self._before = conversation.before
        self._store = api.kept.keeps and body.store is not False
        self._model, self._created = check_model(api, body.model), int(time.time())
        self._output = Output(key)
        self._reader = parser_for(api, chat, asked.prompt)
        self._scores = Scores(api.tokenizer, body.top_logprobs or 0) if chat.logprobs else None
        self._tenant, self._owner = owner.tenant(), owner.current()
        self._status = "in_progress"
        self._error: dict[str, Any] | None = None
        self._run: Run | None = None
        self._ended_at: int | None = None
        self._count = 0  # events so far

    async def whole(self) -> Response:
        async def nowhere(event: dict[str, Any]) -> None:
            pass

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
        self._status, begun = "queued", asyncio.get_running_loop().create_future()
        log = Log() if self._body.stream else None
        record = Record(self.name, self._tenant, self._owner, self._encoded(), background=True, log=log)
        record.turns = (*self._before, msgspec.json.encode(self._items))
        record.task = asyncio.create_task(self._work(record, begun))
        try:
            self._api.kept.store.add(record)
        except Overloaded:
            record.task.cancel()
            raise
        with named(NAMES):
            await begun
        if log is not None:
            return NamedEvents(_events(self._api, self.name, 0))
        return Response(record.body, media_type="application/json")

    # ---- in the background ------------------------------------------------------------------------------------

    async def _work(self, record: Record, begun: asyncio.Future[None]) -> None:
        """Write the answer into the record. `begun` is done once it runs, or fails as it does."""
        store, log = self._api.kept.store, record.log

        async def write(event: dict[str, Any]) -> None:
            if event["type"] in ("response.in_progress", "response.output_item.done"):
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
            record.turns = (*record.turns, msgspec.json.encode(self._output.items))
            if log is not None:
                log.ended = True
                log.changed()
            store.update(record)

    # ---- events -----------------------------------------------------------------------------------------------

    async def _write(self, write: Write, begun: asyncio.Future[None] | None = None) -> None:
        """Run the request and write its events."""
        async with self._api.service.run(self._asked) as run:
            self._run = run
            if begun is not None:
                begun.set_result(None)
                await self._note("created", write)
                await self._note("queued", write)
            async for piece in run:
                if self._status == "queued" or not self._count:
                    self._status = "in_progress"
                    if begun is None:
                        await self._note("created", write)
                    await self._note("in_progress", write)
                for event, logprobs in self._read(run, piece):
                    for told in self._output.take(event, logprobs):
                        await self._put(told, write)
            cut = shapes.finish_reason(run.result.outputs[0]) == "length"
        for told in self._output.end("incomplete" if cut else "completed"):
            await self._put(told, write)
        await self._end("incomplete" if cut else "completed", write)

    def _read(self, run: Run, piece: Piece) -> list[tuple[Event, list[dict[str, Any]] | None]]:
        """Return what a piece says, and the logprobs of the tokens that said it."""
        scores, reader = self._scores, self._reader
        if scores is None:
            return [(event, None) for event in read_piece(reader, run, piece)]
        texts, found, before = (
            texts_of(piece),
            list[tuple[Event, list[dict[str, Any]] | None]](),
            reader.reasoning_tokens,
        )
        scores.add(piece, texts)
        texts = texts or [piece.text]
        lengths = [[length] for length in piece.lengths] or [[]]
        for index, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            ended = piece.output.finished and index == len(texts) - 1
            for event in reader.read(text, ended=ended, tokens=length):
                told = scores.take(event.text) if not hasattr(event, "arguments") else None
                found.append((event, told if isinstance(event, Content) else None))
        run.reasoning_tokens += reader.reasoning_tokens - before
        return found

    async def _fail(self, error: Exception, write: Write) -> None:
        """Tell of a failure on the way."""
        failure = failure_of(error)
        self._error = {"code": _code(failure), "message": failure.message}
        for told in self._output.end("incomplete") if self._output.items else ():
            await self._put(told, write)
        await self._end("failed", write)

    async def _end(self, status: str, write: Write) -> None:
        self._status, self._ended_at = status, int(time.time())
        if self._store and not self._body.background and status != "failed":
            await self._keep()
        await self._note(status, write)

    async def _keep(self) -> None:
        """Keep the answer before its end is told, because the next request may come at once."""

        def encode() -> tuple[bytes, bytes, bytes]:
            return self._encoded(), msgspec.json.encode(self._items), msgspec.json.encode(self._output.items)

        assert self._run is not None
        body, items, output = await off_loop(shapes.entries([self._run]), 2048, encode)
        turns = (*self._before, items, output)
        self._api.kept.store.add(Record(self.name, self._tenant, self._owner, body, turns))

    async def _note(self, kind: str, write: Write) -> None:
        await self._put({"type": f"response.{kind}", "response": self._told()}, write)

    async def _put(self, event: dict[str, Any], write: Write) -> None:
        await write({**event, "sequence_number": self._count})
        self._count += 1

    # ---- the answer as it is ----------------------------------------------------------------------------------

    def _encoded(self) -> bytes:
        return msgspec.json.encode(self._told())

    def _told(self) -> dict[str, Any]:
        body, params, status = self._body, self._asked.params, self._status
        form = None if body.text is None or body.text.format is None else body.text.format
        plain = {"type": "text"}
        text = plain if form is None else form.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": self.name,
            "object": "response",
            "created_at": self._created,
            "completed_at": self._ended_at if status == "completed" else None,
            "status": status,
            "background": bool(body.background),
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": list(self._output.items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "service_tier": "default",
            "store": self._store,
            "temperature": params.temperature,
            "text": {"format": text},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": self._usage() if status in ENDED else None,
        }

    def _usage(self) -> dict[str, Any] | None:
        if self._run is None:
            return None
        usage = shapes.usage_of([self._run])
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        }


def _with_id(item: dict[str, Any], key: str) -> dict[str, Any]:
    """Return an item with an id and a type, by which it can be listed and referred to."""
    kind = item.get("type", "message")
    prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}.get(kind, "fco")
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
