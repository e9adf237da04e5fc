"""The route POST /v1/completions: one prompt or many, as text or as tokens, with or without an echo."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.openai.completion_logprobs import CompletionLogprobs
from ridgeline.serving.generation.pieces import Piece, Usage
from ridgeline.serving.generation.service import GenerationRequest, Run
from ridgeline.serving.http import answers, shapes
from ridgeline.serving.http.describe import described
from ridgeline.serving.http.exchange import read_body, request_id, tell_ignored, together, while_connected
from ridgeline.serving.http.pieces import encoded, json_response
from ridgeline.serving.http.sse import EventStream, Write
from ridgeline.serving.requests.bodies import CompletionBody
from ridgeline.serving.requests.kept import cut_short
from ridgeline.serving.requests.validation import check_model, completion_requests
from ridgeline.text.outputs import CompletionOutput


def router(api: ApiServer) -> APIRouter:
    routes = APIRouter(tags=["generation"])

    @routes.post(
        "/v1/completions",
        **described(CompletionBody, "What follows a prompt", answers.Completion, chunk=answers.CompletionChunk),
    )
    async def completions(request: Request) -> Response:
        return await answer_completion(api, request, await read_body(request, CompletionBody))

    return routes


async def answer_completion(api: ApiServer, request: Request, body: CompletionBody) -> Response:
    """Return the answer to a body with prompts, whole or as a stream. Raise RequestFailed."""
    name = request_id(request, body.request_id)
    answer = Completions(api, body, name, await completion_requests(api, body, name))
    tell_ignored(request, cut_short(api, body))
    if body.stream:
        return EventStream(answer.stream)
    return await while_connected(request.receive, answer.whole())


@dataclass
class _Told:
    """The progress of a choice's chunks. `logprobs` are those that were asked for, once there are any."""

    begun: bool = False
    logprobs: CompletionLogprobs | None = None


class Completions:
    """The answer to one request, whole or in chunks. Choices are numbered through all prompts."""

    def __init__(self, api: ApiServer, body: CompletionBody, name: str, asked: list[GenerationRequest]) -> None:
        self._api, self._body, self._asked = api, body, asked
        self._head = shapes.envelope("cmpl", name, int(time.time()), check_model(api, body.model))
        self._nothing_new = body.max_tokens == 0  # the one token that was made for the echo is not shown

    async def whole(self) -> Response:
        runs = [self._api.service.run(asked) for asked in self._asked]
        await together([self._finish(run) for run in runs])
        return await json_response(shapes.entries(runs), lambda: self._answer(runs))

    def _answer(self, runs: list[Run]) -> answers.Completion:
        choices = [self._choice(run, output, index) for index, run in enumerate(runs) for output in run.result.outputs]
        last = shapes.timing(self._api.config, self._body, runs)
        return answers.Completion(**self._head, choices=choices, usage=self._usage(shapes.usage_of(runs)), **last)

    async def stream(self, write: Write) -> None:
        runs = [self._api.service.run(asked) for asked in self._asked]
        make = partial(answers.CompletionChunk, **self._head)
        chunks = shapes.Chunks(make, write, self._api.config, self._body, runs, self._usage)
        await together([self._stream(run, index, chunks) for index, run in enumerate(runs)])
        await chunks.end()

    async def _finish(self, run: Run) -> None:
        async with run:
            await run.finish()

    async def _stream(self, run: Run, prompt: int, chunks: shapes.Chunks) -> None:
        told = [_Told() for _ in run.drawn]
        async with run:
            async for piece in run.pieces(self._body.stream_interval, scored=True):
                so_far = told[piece.output.index]
                echoes = self._body.echo and not so_far.begun
                size = run.entries if echoes else run.entries_of(piece)
                choice = await run.apart(size, partial(self._delta, run, piece, prompt, so_far))
                chunks.add(run, piece)
                if choice is not None:
                    await chunks.put(choice)

    def _delta(self, run: Run, piece: Piece, prompt: int, told: _Told) -> answers.CompletionDelta | None:
        """Return a chunk's choice, or None if there is nothing to say."""
        output, body, first = piece.output, self._body, not told.begun
        reason = self._reason(output)
        echo = self._prompt_text(run) if body.echo and first else ""
        text = "" if self._nothing_new else piece.text
        token_ids = [] if self._nothing_new else piece.token_ids
        with_tokens = body.logprobs is not None or (body.return_token_ids and token_ids)
        if not (text or echo or reason or with_tokens):
            return None
        if told.logprobs is None:
            told.logprobs = self._logprobs(run)
        told.begun = True
        shown = not self._nothing_new
        return answers.CompletionDelta(
            **self._common(run, output, prompt, echo + text, reason),
            logprobs=None if told.logprobs is None else encoded(told.logprobs.take(output, shown=shown)),
            token_ids=token_ids if body.return_token_ids else UNSET,
            prompt_token_ids=shapes.prompt_ids(run.asked) if body.return_token_ids and first else UNSET,
            weight_versions=shapes.weight_versions(body, run, output) if reason else UNSET,
        )

    def _choice(self, run: Run, output: CompletionOutput, prompt: int) -> answers.CompletionChoice:
        body, text = self._body, "" if self._nothing_new else output.text
        text = self._prompt_text(run) + text if body.echo else text
        made_later: Any = partial(self._whole_logprobs, run, output)
        return answers.CompletionChoice(
            **self._common(run, output, prompt, text, self._reason(output)),
            logprobs=None if body.logprobs is None else made_later,
            prompt_logprobs=shapes.prompt_logprobs(run.result, body.prompt_logprobs),
            prompt_token_ids=shapes.prompt_ids(run.asked) if body.return_token_ids else None,
            token_ids=UNSET if not body.return_token_ids else [] if self._nothing_new else output.token_ids,
            weight_versions=shapes.weight_versions(body, run, output),
        )

    def _common(
        self, run: Run, output: CompletionOutput, prompt: int, text: str, reason: answers.Finish | None
    ) -> dict[str, Any]:
        """Return the fields that a choice has, whole or in a chunk."""
        stop = None if self._nothing_new else output.stop_reason
        index = prompt * run.asked.params.n + output.index
        return {"index": index, "text": text, "finish_reason": reason, "stop_reason": stop}

    def _whole_logprobs(self, run: Run, output: CompletionOutput) -> answers.CompletionLogprobs | None:
        logprobs = self._logprobs(run)
        return None if logprobs is None else logprobs.take(output, shown=not self._nothing_new)

    def _logprobs(self, run: Run) -> CompletionLogprobs | None:
        """Return the logprobs of a choice that begins, with those of its prompt if it is echoed."""
        body, asked, tokenizer = self._body, run.asked, self._api.tokenizer
        if body.logprobs is None:
            return None
        hidden = tokenizer.special_ids - asked.shown if asked.params.skip_special_tokens else frozenset()
        before = () if asked.embeds is not None else reversed(asked.prompt_token_ids)
        echo = (self._prompt_text(run), asked.prompt_token_ids, run.result.prompt_logprobs) if body.echo else None
        return CompletionLogprobs(
            tokenizer,
            -1 if body.logprob_token_ids else body.logprobs,
            by_id=shapes.names_by_id(self._api.config, body),
            hidden=hidden if asked.params.detokenize else None,
            bare=not any(each not in hidden and tokenizer.token_string(each) for each in before),
            echo=echo,
        )

    def _prompt_text(self, run: Run) -> str:
        asked = run.asked
        if asked.prompt is not None:
            return asked.prompt
        return self._api.tokenizer.decode(asked.prompt_token_ids, skip_special_tokens=False)

    def _reason(self, output: CompletionOutput) -> answers.Finish | None:
        reason = shapes.finish_reason(output)
        return "length" if reason and self._nothing_new else reason

    def _usage(self, usage: Usage) -> answers.Usage:
        return shapes.told(usage._replace(completion=0, reasoning=0) if self._nothing_new else usage)
