"""The route POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterable
from functools import partial
from typing import Any

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.openai.calls import Said
from ridgeline.serving.generation.pieces import Piece
from ridgeline.serving.generation.service import GenerationRequest, Run
from ridgeline.serving.http import answers, shapes
from ridgeline.serving.http.describe import described
from ridgeline.serving.http.exchange import read_body, request_id, tell_ignored, while_connected
from ridgeline.serving.http.pieces import encoded, json_response
from ridgeline.serving.http.sse import EventStream, Write
from ridgeline.serving.requests.bodies import ChatBody
from ridgeline.serving.requests.reading import unread
from ridgeline.serving.requests.tools import with_allowed_tools
from ridgeline.serving.requests.validation import chat_request, check_model
from ridgeline.text.outputs import CompletionOutput
from ridgeline.text.parsers.events import Event, Reasoning


def router(api: ApiServer) -> APIRouter:
    routes = APIRouter(tags=["generation"])

    @routes.post(
        "/v1/chat/completions", **described(ChatBody, "A chat's next message", answers.Chat, chunk=answers.ChatChunk)
    )
    async def chat_completions(request: Request) -> Response:
        return await answer_chat(api, request, await read_body(request, ChatBody))

    return routes


async def answer_chat(api: ApiServer, request: Request, body: ChatBody) -> Response:
    """Return the answer to a chat, whole or as a stream. Raise RequestFailed."""
    asked = await chat_request(api, body, request_id(request, body.request_id))
    tell_ignored(request, unread(api, body))
    chat = Chat(api, body, asked)
    if body.stream:
        return EventStream(chat.stream)
    return await while_connected(request.receive, chat.whole())


class Chat:
    """The answer to one request, whole or in chunks."""

    def __init__(self, api: ApiServer, body: ChatBody, asked: GenerationRequest) -> None:
        self._api, self._body = api, with_allowed_tools(body)
        self._asked = asked
        model = check_model(api, body.model)
        self._told_logprobs = [0] * asked.params.n  # entries of each choice that have been sent
        self._said = [Said() for _ in range(asked.params.num_drawn)]  # by whole answers
        self._echo = _echoed(body) if body.echo else ""
        self._head = shapes.envelope("chatcmpl", asked.id, int(time.time()), model)

    async def whole(self) -> Response:
        async with self._api.service.run(self._asked) as run:
            async for piece in run.pieces():
                self._said[piece.output.index].add(self._shown(piece))
        return await json_response(shapes.entries([run]), lambda: self._answer(run))

    def _answer(self, run: Run) -> answers.Chat:
        body, result = self._body, run.result
        return answers.Chat(
            **self._head,
            choices=[self._choice(run, output) for output in result.outputs],
            usage=shapes.told(run.usage),
            prompt_logprobs=shapes.prompt_logprobs(result, body.prompt_logprobs),
            prompt_token_ids=result.prompt_token_ids if body.return_token_ids else None,
            prompt_text=self._asked.prompt if body.return_prompt_text else UNSET,
            **shapes.timing(self._api.config, body, [run]),
        )

    async def stream(self, write: Write) -> None:
        async with self._api.service.run(self._asked) as run:
            greeted: set[int] = set()
            make = partial(answers.ChatChunk, **self._head)
            chunks = shapes.Chunks(make, write, self._api.config, self._body, [run])
            async for piece in run.pieces(self._body.stream_interval):
                index = piece.output.index
                said = None if piece.read is None else Said().add(self._shown(piece))  # most need no events
                if index not in greeted:
                    greeted.add(index)
                    await self._greet(chunks, run, index)
                chunks.add(run, piece)
                if self._body.logprobs:  # which may list the whole vocabulary
                    choice = await run.apart(run.entries_of(piece), partial(self._delta, run, piece, said))
                else:
                    choice = self._delta(run, piece, said)
                if choice is not None:
                    await chunks.put(choice)
        await chunks.end()

    def _greet(self, chunks: shapes.Chunks, run: Run, index: int) -> Awaitable[None]:
        """Write the first chunk of a choice, which names the role of the speaker."""
        body, first = self._body, index == 0
        return chunks.put(
            answers.ChatDelta(index=index, delta=answers.Delta(role="assistant", content=self._echo)),
            prompt_token_ids=run.asked.prompt_token_ids if body.return_token_ids and first else UNSET,
            prompt_text=self._asked.prompt if body.return_prompt_text and first else UNSET,
        )

    def _delta(self, run: Run, piece: Piece, said: Said | None) -> answers.ChatDelta | None:
        """Return a chunk's choice, or None if there is nothing to say."""
        output, body = piece.output, self._body
        content, calls, thought = (piece.text, [], "") if said is None else (said.content, said.calls, said.reasoning)
        reason = self._reason(run, output)
        more = bool(calls or thought or reason)
        if not (content or more or body.logprobs or (body.return_token_ids and piece.token_ids)):
            return None
        return answers.ChatDelta(
            index=output.index,
            delta=answers.Delta(
                content=content if content or not more else UNSET, tool_calls=calls or UNSET, **_thought(thought)
            ),
            logprobs=None if output.logprobs is None else encoded(self._new_logprobs(output)),
            finish_reason=reason,
            stop_reason=output.stop_reason if reason else UNSET,
            token_ids=piece.token_ids if body.return_token_ids else UNSET,
            weight_versions=shapes.weight_versions(body, run, output) if reason else UNSET,
        )

    def _choice(self, run: Run, output: CompletionOutput) -> answers.ChatChoice:
        said = self._said[run.place(output)]
        content, calls, thought = self._echo + said.content, said.calls, _thought(said.reasoning)
        whole = [
            answers.ToolCall(
                id=call.id or "",
                function=answers.Function(name=call.function.name or "", arguments=call.function.arguments),
            )
            for call in calls
        ]
        return answers.ChatChoice(
            index=output.index,
            message=answers.Message(
                content=content or None if calls or thought else content, tool_calls=whole or UNSET, **thought
            ),
            logprobs=self._new_logprobs(output),
            finish_reason=self._reason(run, output),
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._body.return_token_ids else UNSET,
            weight_versions=shapes.weight_versions(self._body, run, output),
        )

    def _shown(self, piece: Piece) -> Iterable[Event]:
        """Return the events of a piece, without the reasoning if the client wants none."""
        hidden = self._body.include_reasoning is False
        return [event for event in piece.events if not isinstance(event, Reasoning)] if hidden else piece.events

    def _reason(self, run: Run, output: CompletionOutput) -> answers.ChatFinish | None:
        """Return the choice's finish reason. As with OpenAI it is "stop" after a call that the client itself named."""
        reason = shapes.finish_reason(output)
        called = reason == "stop" and run.readers[run.place(output)].found_calls
        return "tool_calls" if called and not isinstance(self._body.tool_choice, dict) else reason

    def _new_logprobs(self, output: CompletionOutput) -> answers.ChatLogprobs | None:
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
