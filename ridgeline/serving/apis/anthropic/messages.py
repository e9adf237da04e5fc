"""The routes of Anthropic's API: POST /v1/messages, /v1/messages/count_tokens, and vLLM's /v1/messages/render.

A request is put into a chat's words (bodies.py) and runs as chats do. Errors have Anthropic's shape
(http/errors.py), and `x-api-key` is a key as any other.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.anthropic.bodies import NAMES, CountMessagesBody, MessagesBody, chat_of
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.generation.pieces import Usage
from ridgeline.serving.generation.service import GenerationRequest, Run
from ridgeline.serving.http import answers, shapes
from ridgeline.serving.http.answers import MessageEvent
from ridgeline.serving.http.describe import described
from ridgeline.serving.http.exchange import read_body, request_id, tell_ignored, while_connected
from ridgeline.serving.http.items import Item, Items
from ridgeline.serving.http.pieces import json_of, json_response
from ridgeline.serving.http.render import shown
from ridgeline.serving.http.sse import MessageEvents, Write, nowhere
from ridgeline.serving.requests.bodies import ChatBody
from ridgeline.serving.requests.bounded_json import INLINE_BYTES, object_of
from ridgeline.serving.requests.reading import unread
from ridgeline.serving.requests.refusals import shortened
from ridgeline.serving.requests.translation import bounded, later_instructions, named
from ridgeline.serving.requests.unenforced import unenforced
from ridgeline.serving.requests.validation import chat_length, chat_request, check_model
from ridgeline.serving.shares import off_loop
from ridgeline.text.outputs import CompletionOutput
from ridgeline.text.parsers.events import CallDelta, Event, Reasoning

VERSIONS = ("2023-06-01", "2026-10-21")  # their answers are alike; the later one has no fields for sampling
DATE = re.compile(r"20[0-9]{2}-[0-9]{2}-[0-9]{2}")
SIGNATURE = "unsigned"  # clients drop thinking without one; it is not checked here


def router(api: ApiServer) -> APIRouter:
    routes = APIRouter(tags=["generation"])

    async def read(request: Request) -> tuple[MessagesBody, GenerationRequest]:
        _check_version(request)
        body = await read_body(request, MessagesBody)
        name = request_id(request, body.request_id)
        with named(NAMES):
            chat = await _chat(api, body, request)
            return body, bounded(api, await chat_request(api, chat, name), body.max_tokens)

    @routes.post(
        "/v1/messages",
        **described(
            MessagesBody,
            "A conversation's next message",
            answers.MessageAnswer,
            chunk=answers.MessageEvent,
            named=True,
            error=answers.AnthropicsErrorAnswer,
        ),
    )
    async def messages(request: Request) -> Response:
        body, asked = await read(request)
        answer = Answer(api, body, asked)
        if body.stream:
            return MessageEvents(answer.stream)
        with named(NAMES):
            return await while_connected(request.receive, answer.whole())

    @routes.post(
        "/v1/messages/render",
        **described(MessagesBody, "A conversation as a prompt", answers.Rendered, error=answers.AnthropicsErrorAnswer),
    )
    async def render_messages(request: Request) -> Response:
        body, asked = await read(request)
        return await json_response(len(asked.prompt_token_ids), lambda: shown(api, body, asked))

    @routes.post(
        "/v1/messages/count_tokens",
        **described(
            CountMessagesBody,
            "The length of the prompt",
            answers.MessageTokens,
            error=answers.AnthropicsErrorAnswer,
        ),
    )
    async def count(request: Request) -> Response:
        _check_version(request)
        body = await read_body(request, CountMessagesBody)
        with named(NAMES):
            check_model(api, body.model)
            chat = await _chat(api, body, request)
            tokens = answers.MessageTokens(input_tokens=await chat_length(api, chat))
        return json_of(tokens)

    return routes


def _check_version(request: Request) -> None:
    """Raise BadRequest for a version before the first. One that came later than ours is named as ignored, so that a
    client's update does not end its work."""
    version = request.headers.get("anthropic-version")
    if version is None or version in VERSIONS:
        return
    if not DATE.fullmatch(version) or version < VERSIONS[0]:
        raise BadRequest(f"anthropic-version is {' or '.join(VERSIONS)}, got {shortened(version)}.")
    tell_ignored(request, ["anthropic-version"])


async def _chat(api: ApiServer, body: CountMessagesBody, request: Request) -> ChatBody:
    size = len(await request.body())
    later = await later_instructions(api, (turn.role for turn in body.messages[1:]))
    pictures = "image" in api.modalities
    chat, ignored = await off_loop(size, INLINE_BYTES, lambda: chat_of(body, api.forms, later=later, pictures=pictures))
    tell_ignored(request, [*ignored, *unenforced(chat), *unread(api, chat)])
    return chat


class Answer:
    """The answer to one request, whole or streamed."""

    def __init__(self, api: ApiServer, body: MessagesBody, asked: GenerationRequest) -> None:
        self._api, self._body, self._asked = api, body, asked
        self._model = check_model(api, body.model)
        self._blocks = Blocks()
        self._name = f"msg_{uuid.uuid4().hex}"

    async def whole(self) -> Response:
        run = await self._run(nowhere)
        return await json_response(shapes.entries([run]), lambda: self._message(run.usage, **self._reason(run)))

    async def stream(self, write: Write) -> None:
        run = await self._run(write)
        await write(MessageEvent(type="message_delta", delta=self._reason(run), usage=_usage(run.usage)))
        await write(MessageEvent(type="message_stop"))

    async def _run(self, write: Write) -> Run:
        """Run the request to its end, and write its events but the last."""
        begun = False
        async with self._api.service.run(self._asked) as run:
            async for piece in run.pieces():
                if not begun:
                    begun = True
                    unread = run.usage._replace(reasoning=0)  # the first piece comes behind it
                    await write(MessageEvent(type="message_start", message=self._message(unread)))
                    await write(MessageEvent(type="ping"))
                for event in piece.events:
                    for told in self._blocks.take(event):
                        await write(told)
        for told in self._blocks.end():
            await write(told)
        return run

    def _message(
        self, usage: Usage, stop_reason: Any = None, stop_sequence: str | None = None
    ) -> answers.MessageAnswer:
        return answers.MessageAnswer(
            id=self._name,
            model=self._model,
            content=list(self._blocks.items),
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=_usage(usage),
        )

    def _reason(self, run: Run) -> dict[str, Any]:
        output = run.result.outputs[0]
        return {"stop_reason": self._why(run, output), "stop_sequence": _stopped_by(output)}

    def _why(self, run: Run, output: CompletionOutput) -> str:
        """Return the stop reason in Anthropic's words."""
        if shapes.finish_reason(output) == "length":
            whole = len(output.token_ids) >= self._body.max_tokens
            return "max_tokens" if whole else "model_context_window_exceeded"
        if run.readers[0].found_calls:
            return "tool_use"
        return "end_turn" if _stopped_by(output) is None else "stop_sequence"


def _stopped_by(output: CompletionOutput) -> str | None:
    return output.stop_reason if isinstance(output.stop_reason, str) else None


def _usage(usage: Usage) -> answers.MessageUsage:
    """Return the counts so far. Tokens that were found in the cache are none of `input_tokens`."""
    return answers.MessageUsage(
        input_tokens=usage.prompt - usage.cached,
        cache_read_input_tokens=usage.cached,
        output_tokens=usage.completion,
        output_tokens_details=answers.OutputTokensDetails(thinking_tokens=usage.reasoning),
    )


class Blocks(Items[MessageEvent]):
    """The content of one message."""

    def _begin(self, event: Event) -> Iterator[MessageEvent]:
        self.items.append(_begun(event))
        yield self._told("start", content_block=dict(self.items[-1]))

    def _grow(self, event: Event, text: str, logprobs: object) -> MessageEvent:
        return self._told("delta", delta=_delta_of(event, text))

    def _end(self, block: Item, text: str, status: str) -> Iterator[MessageEvent]:
        if block["type"] == "tool_use":
            block["input"] = object_of(text)
        elif block["type"] == "thinking":
            block |= {"thinking": text, "signature": SIGNATURE}
            yield self._told("delta", delta={"type": "signature_delta", "signature": SIGNATURE})
        else:
            block["text"] = text
        yield self._told("stop")

    def _told(self, kind: str, **fields: Any) -> MessageEvent:
        return MessageEvent(type=f"content_block_{kind}", index=len(self.items) - 1, **fields)


def _begun(event: Event) -> Item:
    if isinstance(event, CallDelta):
        return {
            "type": "tool_use",
            "id": event.id or f"toolu_{uuid.uuid4().hex}",
            "name": event.name or "",
            "input": {},
        }
    if isinstance(event, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": "", "citations": None}


def _delta_of(event: Event, text: str) -> Item:
    if isinstance(event, CallDelta):
        return {"type": "input_json_delta", "partial_json": text}
    if isinstance(event, Reasoning):
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}
