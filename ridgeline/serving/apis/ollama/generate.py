"""The routes POST /api/chat and /api/generate. Answers come in lines of JSON, unless `stream` is false."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.ollama.answers import Called, CalledFunction, OllamasChat, OllamasMessage, OllamasText
from ridgeline.serving.apis.ollama.bodies import (
    GeneratingBody,
    OllamasChatBody,
    OllamasGenerateBody,
    chat_of,
    completion_of,
    known_name,
    length_of,
)
from ridgeline.serving.generation.pieces import Piece
from ridgeline.serving.generation.service import GenerationRequest, Run
from ridgeline.serving.http import shapes
from ridgeline.serving.http.answers import OllamasError
from ridgeline.serving.http.describe import described
from ridgeline.serving.http.exchange import read_body, request_id, tell_ignored, while_connected
from ridgeline.serving.http.items import Item, Items
from ridgeline.serving.http.pieces import encoded, json_of, json_response
from ridgeline.serving.http.sse import Lines, Write
from ridgeline.serving.requests.bounded_json import INLINE_BYTES, object_of
from ridgeline.serving.requests.reading import unread
from ridgeline.serving.requests.translation import bounded
from ridgeline.serving.requests.unenforced import unenforced
from ridgeline.serving.requests.validation import chat_request, check_model, completion_requests
from ridgeline.serving.shares import off_loop
from ridgeline.text.outputs import CompletionOutput
from ridgeline.text.parsers.events import CallDelta, Event, Reasoning

NANO = 10**9
Generating = OllamasChatBody | OllamasGenerateBody


def router(api: ApiServer) -> APIRouter:
    routes = APIRouter(tags=["ollama"])

    @routes.post(
        "/api/chat",
        **described(
            OllamasChatBody, "A chat's next message", OllamasChat, chunk=OllamasChat, lines=True, error=OllamasError
        ),
    )
    async def chat(request: Request) -> Response:
        body = await read_body(request, OllamasChatBody)
        return await _answer(api, request, body, body.messages, _chat_line)

    @routes.post(
        "/api/generate",
        **described(
            OllamasGenerateBody, "What follows a prompt", OllamasText, chunk=OllamasText, lines=True, error=OllamasError
        ),
    )
    async def generate(request: Request) -> Response:
        body = await read_body(request, OllamasGenerateBody)
        return await _answer(api, request, body, body.prompt or body.suffix or body.images, _text_line)

    return routes


async def _answer(
    api: ApiServer, request: Request, body: Generating, asks: object, line: Callable[..., Any]
) -> Response:
    """Return the answer to a request. One that asks for nothing is how clients load a model, which is there already."""
    check_model(api, known_name(api, body.model))
    model = body.model or api.names[0]
    if not asks:
        return json_of(line(OllamasMessage(), model=model, created_at=now(), done=True, done_reason="load"))
    asked = await _asked(api, request, body)
    answer = Answer(api, body, asked, model, line)
    if body.stream is not False:
        return Lines(answer.stream)
    return await while_connected(request.receive, answer.whole())


async def _asked(api: ApiServer, request: Request, body: Generating) -> GenerationRequest:
    """Return the checked request: a completion's for a text that is continued, else a chat's."""
    name, size = request_id(request), len(await request.body())
    most, context = length_of(body)
    if isinstance(body, OllamasGenerateBody) and (body.raw or body.suffix or not api.chat_template.available):
        completion, ignored = await off_loop(size, INLINE_BYTES, partial(completion_of, api, body))
        tell_ignored(request, [*ignored, *unenforced(completion)])
        [asked] = await completion_requests(api, completion, name)
        return bounded(api, asked, most or api.service.facts().max_model_len, context)
    chat, ignored = await off_loop(size, INLINE_BYTES, partial(chat_of, api, body))
    tell_ignored(request, [*ignored, *unenforced(chat), *unread(api, chat)])
    return bounded(api, await chat_request(api, chat, name), most, context)


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _chat_line(message: OllamasMessage, **fields: Any) -> OllamasChat:
    return OllamasChat(message=message, **fields)


def _text_line(message: OllamasMessage, **fields: Any) -> OllamasText:
    calls = message.tool_calls
    return OllamasText(response=message.content, thinking=message.thinking, tool_calls=calls, **fields)


class Answer:
    """The answer to one request, whole or in lines."""

    def __init__(
        self, api: ApiServer, body: GeneratingBody, asked: GenerationRequest, model: str, line: Callable[..., Any]
    ) -> None:
        self._api, self._asked, self._model, self._line = api, asked, model, line
        self._top = body.top_logprobs or 0
        self._told_logprobs = 0
        self._began = time.monotonic()

    async def whole(self) -> Response:
        said, parts = Parts(), list[OllamasMessage]()
        async with self._api.service.run(self._asked) as run:
            async for piece in run.pieces():
                parts += said.of(piece)
        parts += said.end()

        def content() -> Any:
            return self._told(_joined(parts), logprobs=self._logprobs(run.result.outputs[0]), **self._ending(run))

        return await json_response(shapes.entries([run]), content)

    async def stream(self, write: Write) -> None:
        said = Parts()
        async with self._api.service.run(self._asked) as run:
            async for piece in run.pieces():
                new = partial(self._encoded_logprobs, piece.output)
                scores = UNSET if piece.output.logprobs is None else await run.apart(run.entries_of(piece), new)
                for part in said.of(piece) or ([OllamasMessage()] if scores is not UNSET else []):
                    await write(self._told(part, done=False, logprobs=scores))
                    scores = UNSET  # they stand with the first of a piece
        for part in said.end():
            await write(self._told(part, done=False))
        await write(self._told(OllamasMessage(), **self._ending(run)))

    def _told(self, message: OllamasMessage, **fields: Any) -> Any:
        return self._line(message, model=self._model, created_at=now(), **fields)

    def _logprobs(self, output: CompletionOutput) -> Any:
        """Return the logprobs of the tokens since the last call, if there are any."""
        start, end = self._told_logprobs, len(output.logprobs or ())
        if output.logprobs is None or start == end:
            return UNSET
        self._told_logprobs = end
        entries = shapes.between(output.logprobs, start, end)
        return shapes.chat_logprobs(self._api.tokenizer, output.token_ids[start:end], entries, self._top).content

    def _encoded_logprobs(self, output: CompletionOutput) -> Any:
        found = self._logprobs(output)
        return found if found is UNSET else encoded(found)

    def _ending(self, run: Run) -> dict[str, Any]:
        """Return the fields of the last line: the reason for the end, counts and durations."""
        output, [ended] = run.result.outputs[0], run.endings
        reason: Literal["stop", "length"] = "length" if shapes.finish_reason(output) == "length" else "stop"
        found: dict[str, Any] = {
            "done": True,
            "done_reason": reason,
            "total_duration": nanoseconds(time.monotonic() - self._began),
            "prompt_eval_count": run.usage.prompt,
            "eval_count": run.usage.completion,
        }
        stats = ended.stats if ended is not None else None
        if stats is not None and stats.first_scheduled is not None and stats.first_token is not None:
            found["load_duration"] = nanoseconds(stats.first_scheduled - stats.arrival)
            found["prompt_eval_duration"] = nanoseconds(stats.first_token - stats.first_scheduled)
            found["eval_duration"] = nanoseconds(stats.finished - stats.first_token)
        return found


def nanoseconds(seconds: float) -> int:
    return max(0, int(seconds * NANO))


class Parts(Items[OllamasMessage]):
    """The parts of one answer. A call is sent when it is whole, because its arguments are an object."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def of(self, piece: Piece) -> list[OllamasMessage]:
        return [part for event in piece.events for part in self.take(event)]

    def _begin(self, event: Event) -> Iterator[OllamasMessage]:
        item: Item = {}
        if isinstance(event, CallDelta):
            item = {"id": event.id or f"call_{uuid.uuid4().hex}", "name": event.name or ""}
        self.items.append(item)
        yield from ()

    def _grow(self, event: Event, text: str, logprobs: object) -> OllamasMessage | None:
        if isinstance(event, CallDelta):
            return None
        return OllamasMessage(thinking=text) if isinstance(event, Reasoning) else OllamasMessage(content=text)

    def _end(self, item: Item, text: str, status: str) -> Iterator[OllamasMessage]:
        if item:
            function = CalledFunction(index=self._calls, name=item["name"], arguments=object_of(text))
            self._calls += 1
            yield OllamasMessage(tool_calls=[Called(id=item["id"], function=function)])


def _joined(parts: Iterable[OllamasMessage]) -> OllamasMessage:
    """Return one message of all parts."""
    listed = list(parts)
    thinking = "".join(part.thinking for part in listed if part.thinking is not UNSET)
    calls = [call for part in listed if part.tool_calls is not UNSET for call in part.tool_calls]
    content = "".join(part.content for part in listed)
    return OllamasMessage(content=content, thinking=thinking or UNSET, tool_calls=calls or UNSET)
