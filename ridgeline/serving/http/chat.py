"""The route POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterable
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.generation.service import GenerationRequest, Piece, Run
from ridgeline.serving.http import answers, shapes
from ridgeline.serving.http.calls import Said
from ridgeline.serving.http.describe import described
from ridgeline.serving.http.exchange import read_body, request_id, while_connected
from ridgeline.serving.http.pieces import encoded, json_response
from ridgeline.serving.http.sse import EventStream, Write
from ridgeline.serving.requests.bodies import ChatBody
from ridgeline.serving.requests.reading import parser_for, read_piece
from ridgeline.serving.requests.tools import with_allowed_tools
from ridgeline.serving.requests.validation import chat_request, check_model
from ridgeline.serving.shares import INLINE_ENTRIES, off_loop
from ridgeline.text.outputs import CompletionOutput
from ridgeline.text.parsers.events import Event, Reasoning


def router(api: ApiServer) -> APIRouter:
    routes = APIRouter(tags=["generation"])

    @routes.post(
        "/v1/chat/completions", **described(ChatBody, "A chat's next message", answers.Chat, chunk=answers.ChatChunk)
    )
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, ChatBody)
        asked = await chat_request(api, body, request_id(request, body.request_id))
        chat = Chat(api, body, asked)
        if body.stream:
            return EventStream(chat.stream)
        return await while_connected(request.receive, chat.whole())

    return routes


class Chat:
    """The answer to one request, whole or in chunks."""

    def __init__(self, api: ApiServer, body: ChatBody, asked: GenerationRequest) -> None:
        self._api, self._body = api, with_allowed_tools(body)
        self._asked = asked
        self._model, self._created = check_model(api, body.model), int(time.time())
        self._told_logprobs = [0] * asked.params.n  # entries of each choice that have been sent
        self._readers = [parser_for(api, body, asked.prompt) for _ in range(asked.params.num_drawn)]
        self._said: list[Said] = [Said() for _ in self._readers]  # by whole answers
        self._echo = _echoed(body) if body.echo else ""
        self._head = self._envelope("chat.completion.chunk")  # as every chunk begins
        self._usage = shapes.wants_usage(api.config, body)

    async def whole(self) -> Response:
        async with self._api.service.run(self._asked) as run:
            async for piece in run:
                self._said[piece.output.index].add(await self._read(run, piece))
        return await json_response(shapes.entries([run]), lambda: self._answer(run))

    def _answer(self, run: Run) -> dict[str, Any]:
        result = run.result
        answer = self._envelope("chat.completion") | {
            "choices": [self._choice(output, run.place(output)) for output in result.outputs],
            "usage": shapes.usage_of([run]).json(),
            "prompt_logprobs": None,
            "prompt_token_ids": None,
        }
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = shapes.prompt_logprobs(result, self._body.prompt_logprobs)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = result.prompt_token_ids
        if self._body.return_prompt_text:
            answer["prompt_text"] = self._asked.prompt
        return answer | shapes.timing(self._api.config, self._body, [run])

    async def stream(self, write: Write) -> None:
        at_end, always = self._usage
        async with self._api.service.run(self._asked) as run:
            greeted: set[int] = set()
            tally = shapes.Tally([run])
            async for piece in shapes.spaced(run, self._body.stream_interval):
                plain = self._readers[piece.output.index].plain  # most are, and need no events
                said = None if plain else Said().add(await self._read(run, piece))
                index = piece.output.index
                if index not in greeted:
                    greeted.add(index)
                    await self._greet(write, tally, run, index)
                tally.add(run, piece)
                if self._body.logprobs:  # which may list the whole vocabulary
                    size = run.entries_of(piece)
                    with run.working():
                        choice = await off_loop(size, INLINE_ENTRIES, partial(self._delta, piece, said))
                else:
                    choice = self._delta(piece, said)
                if choice is not None:
                    await self._write(write, tally, [choice])
        last = shapes.timing(self._api.config, self._body, [run])
        if at_end or always or last:
            chunk = self._envelope("chat.completion.chunk") | {"choices": []} | last
            if at_end or always:
                chunk["usage"] = shapes.usage_of([run]).json()
            await write(chunk)

    def _greet(self, write: Write, tally: shapes.Tally, run: Run, index: int) -> Awaitable[None]:
        """Write the first chunk of a choice, which names the role of the speaker."""
        delta = {"role": "assistant", "content": self._echo}
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        extra: dict[str, Any] = (
            {"prompt_token_ids": run.asked.prompt_token_ids} if self._body.return_token_ids and index == 0 else {}
        )
        if self._body.return_prompt_text and index == 0:
            extra["prompt_text"] = self._asked.prompt
        return self._write(write, tally, [choice], extra)

    def _write(
        self, write: Write, tally: shapes.Tally, choices: list[dict[str, Any]], extra: dict[str, Any] | None = None
    ) -> Awaitable[None]:
        chunk = {**self._head, "choices": choices}
        if extra:
            chunk |= extra
        at_end, always = self._usage
        if at_end:
            chunk["usage"] = tally.usage.json() if always else None
        return write(chunk)

    def _delta(self, piece: Piece, said: Said | None) -> dict[str, Any] | None:
        """Return a chunk's choice, or None if there is nothing to say."""
        output, body = piece.output, self._body
        delta: dict[str, Any] = {}
        if said is not None:
            delta = _thought(said.reasoning)
            if calls := said.calls:
                delta["tool_calls"] = calls
        reason = self._reason(output, output.index)
        content = piece.text if said is None else said.content
        if not (content or delta or reason or body.logprobs or (body.return_token_ids and piece.token_ids)):
            return None
        if content or not (delta or reason):
            delta = {"content": content} | delta
        choice: dict[str, Any] = {
            "index": output.index,
            "delta": delta,
            "logprobs": None if output.logprobs is None else encoded(self._new_logprobs(output)),
            "finish_reason": reason,
        }
        if reason:
            choice["stop_reason"] = output.stop_reason
        if body.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return choice

    def _choice(self, output: CompletionOutput, place: int) -> dict[str, Any]:
        """Return the choice that the completion drawn at this place became."""
        said = self._said[place]
        content, calls, thought = self._echo + said.content, said.calls, _thought(said.reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None} | thought
        if calls:
            message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
        if calls or thought:
            message["content"] = content or None
        choice: dict[str, Any] = {
            "index": output.index,
            "message": message,
            "logprobs": self._new_logprobs(output),
            "finish_reason": self._reason(output, place),
            "stop_reason": output.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    async def _read(self, run: Run, piece: Piece) -> Iterable[Event]:
        """Return the events of a piece, without the reasoning if the client wants none."""
        events = await read_piece(self._readers[piece.output.index], run, piece)
        if self._body.include_reasoning is False:
            return [event for event in events if not isinstance(event, Reasoning)]
        return events

    def _reason(self, output: CompletionOutput, place: int) -> str | None:
        """Return the choice's finish reason. As with OpenAI it is "stop" after a call that the client itself named."""
        reason = shapes.finish_reason(output)
        called = self._readers[place].found_calls
        return "tool_calls" if called and reason == "stop" and not isinstance(self._body.tool_choice, dict) else reason

    def _new_logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        """Return the logprobs of the tokens since the last call."""
        if output.logprobs is None:
            return None
        start = self._told_logprobs[output.index]
        end = self._told_logprobs[output.index] = len(output.logprobs)
        ids = output.token_ids[start:end]
        body = self._body
        top, by_id = (
            -1 if body.logprob_token_ids else body.top_logprobs or 0,
            shapes.names_by_id(self._api.config, body),
        )
        entries = shapes.between(output.logprobs, start, end)
        return shapes.chat_logprobs(self._api.tokenizer, ids, entries, top, by_id=by_id)

    def _envelope(self, kind: str) -> dict[str, Any]:
        return shapes.envelope("chatcmpl", self._asked.id, kind, self._created, self._model)


def _thought(reasoning: str) -> dict[str, Any]:
    """Return the fields for reasoning: vLLM's name of today, and the older one that most clients know."""
    return {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}


def _echoed(body: ChatBody) -> str:
    """Return the text of the last message, if the answer is one of the same role, which it goes on with."""
    last = body.messages[-1]
    if last.role != "assistant" and body.add_generation_prompt is not False:
        return ""
    if isinstance(last.content, list):
        return "".join(part["text"] for part in last.content if isinstance(part.get("text"), str))
    return last.content or ""
