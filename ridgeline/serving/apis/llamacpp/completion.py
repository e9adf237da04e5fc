"""The routes POST /completion and /infill of llama.cpp's server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any, Literal

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.core.plan.request import RequestStats
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.llamacpp.answers import DrawnToken, Predicted, ScoredToken, Timings
from ridgeline.serving.apis.llamacpp.bodies import InfillBody, LlamaBody, PredictBody, completion_of, extras
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.generation.pieces import Piece
from ridgeline.serving.generation.service import GenerationRequest, Run
from ridgeline.serving.http import shapes
from ridgeline.serving.http.describe import described
from ridgeline.serving.http.exchange import read_body, request_id, tell_ignored, together, while_connected
from ridgeline.serving.http.pieces import encoded, json_response, later
from ridgeline.serving.http.sse import PlainEvents, Write
from ridgeline.serving.requests.bounded_json import INLINE_BYTES
from ridgeline.serving.requests.context import check_text
from ridgeline.serving.requests.translation import bounded
from ridgeline.serving.requests.unenforced import unenforced
from ridgeline.serving.requests.validation import check_model, completion_requests
from ridgeline.serving.shares import INLINE_ENTRIES, TEXTS, off_loop
from ridgeline.text.infill import Fitted, infill_within, marks
from ridgeline.text.outputs import CompletionOutput, TokenIdLogprobs

MILLI = 1000.0
SHORTEST = 1e-6  # seconds that a rate is divided by at least


def router(api: ApiServer) -> APIRouter:
    routes = APIRouter(tags=["llama.cpp"])

    async def completion(request: Request) -> Response:
        body = await read_body(request, LlamaBody)
        check_model(api, body.model)
        prompt = body.prompt
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        return await _answer(api, request, body, prompt, several=several)

    for path in ("/completion", "/completions"):
        routes.post(path, **described(LlamaBody, "What follows prompts", Predicted, chunk=Predicted, listed=None))(
            completion
        )

    @routes.post("/infill", **described(InfillBody, "What stands between two texts", Predicted, chunk=Predicted))
    async def infill(request: Request) -> Response:
        body = await read_body(request, InfillBody)
        check_model(api, body.model)
        fitted = await _fitted(api, body)
        return await _answer(api, request, body, fitted.ids, cut=fitted.cut)

    return routes


async def _fitted(api: ApiServer, body: InfillBody) -> Fitted:
    """Return the prompt of an infill, cut to the context. Raise BadRequest for a model that has no tokens for it."""
    if (marked := marks(api.tokenizer)) is None:
        message = "infill is not supported: the model has no tokens for filling in the middle; use /completion."
        raise BadRequest(message, param="input_prefix")
    prefix, suffix = f"{body.input_prefix or ''}{body.prompt or ''}", body.input_suffix or ""
    others = extras(body.input_extra or ())
    context = api.service.facts().max_model_len
    for name, length in (
        ("input_prefix", len(prefix)),
        ("input_suffix", len(suffix)),
        ("input_extra", sum(len(name) + len(text) for name, text in others)),
    ):
        check_text(context, length, name)
    wanted = min(max(body.n_predict or 0, 1), context // 2)
    return await TEXTS.run(partial(infill_within, api.tokenizer, prefix, suffix, marked, others, context - wanted))


async def _answer(
    api: ApiServer, request: Request, body: PredictBody, prompt: Any, *, several: bool = False, cut: bool = False
) -> Response:
    size = len(await request.body())
    completion = await off_loop(size, INLINE_BYTES, partial(completion_of, api.tokenizer, body, prompt))
    tell_ignored(request, unenforced(completion))
    asked = await completion_requests(api, completion, request_id(request))
    most = api.service.facts().max_model_len if body.n_predict is None or body.n_predict < 0 else body.n_predict or 1
    checked = sum(len(each.params.logit_bias or ()) for each in asked)
    asked = await off_loop(checked, INLINE_ENTRIES, lambda: [bounded(api, each, most) for each in asked])
    answer = Answer(api, body, asked, cut=cut)
    if body.stream:
        return PlainEvents(answer.stream)
    return await while_connected(request.receive, answer.whole(listed=several))


class Answer:
    """The answer to one request, whole or in parts, with one result for each prompt."""

    def __init__(self, api: ApiServer, body: PredictBody, asked: Sequence[GenerationRequest], *, cut: bool) -> None:
        self._api, self._body, self._asked, self._cut = api, body, asked, cut
        self._model = check_model(api, body.model)
        self._hidden = body.n_predict == 0  # the one token that was drawn for the prompt's sake

    async def whole(self, *, listed: bool) -> Response:
        runs = [self._api.service.run(asked) for asked in self._asked]
        await together([self._finish(run) for run in runs])

        def content() -> Predicted | list[Predicted]:
            found = [self._last(run, index, whole=True) for index, run in enumerate(runs)]
            return found if listed else found[0]

        return await json_response(sum(map(_size, runs)), content)

    async def stream(self, write: Write) -> None:
        runs = [self._api.service.run(asked) for asked in self._asked]
        await together([self._stream(run, index, write) for index, run in enumerate(runs)])

    async def _finish(self, run: Run) -> None:
        async with run:
            await run.finish()

    async def _stream(self, run: Run, index: int, write: Write) -> None:
        told = 0
        async with run:
            async for piece in run.pieces():
                if self._hidden or not (piece.text or piece.token_ids):
                    continue
                part = partial(self._part, run, piece, index, told)
                await write(await run.apart(run.entries_of(piece), part))
                told += len(piece.token_ids)
        await write(await run.apart(_size(run), partial(self._last, run, index, whole=False)))

    def _part(self, run: Run, piece: Piece, index: int, told: int) -> Predicted:
        scores = self._scores(piece.output, told, told + len(piece.token_ids))
        return Predicted(
            index=index,
            content=piece.text,
            tokens=piece.token_ids,
            stop=False,
            tokens_predicted=run.usage.completion,
            tokens_evaluated=run.usage.prompt,
            completion_probabilities=encoded(scores) if scores is not UNSET else UNSET,
        )

    def _last(self, run: Run, index: int, *, whole: bool) -> Predicted:
        """Return a whole result, or the last part of a stream."""
        output = run.result.outputs[0]
        kind, word = _stop_of(output)
        shown, usage = whole and not self._hidden, run.usage
        return Predicted(
            index=index,
            content=output.text if shown else "",
            tokens=output.token_ids if shown and self._body.return_tokens else [],
            stop=True,
            tokens_predicted=0 if self._hidden else usage.completion,
            tokens_evaluated=usage.prompt,
            completion_probabilities=self._scores(output, 0, len(output.token_ids)) if shown else UNSET,
            model=self._model,
            stop_type="limit" if self._hidden else kind,
            stopping_word="" if self._hidden else word,
            truncated=self._cut,
            has_new_line=not self._hidden and "\n" in output.text,
            tokens_cached=usage.prompt + usage.completion,
            prompt=self._prompt(run.asked),
            generation_settings=self._settings | {"n_predict": run.asked.params.max_tokens},
            timings=_timings(run),
        )

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The parameters of all prompts, which differ in their number of tokens alone."""
        params = asdict(self._asked[0].params)
        found = {name: value for name, value in params.items() if value is not None and name != "max_tokens"}
        return found | {"logit_bias": encoded(found["logit_bias"])} if "logit_bias" in found else found

    def _prompt(self, asked: GenerationRequest) -> str:
        if asked.prompt is not None:
            return asked.prompt
        return self._api.tokenizer.decode(asked.prompt_token_ids, skip_special_tokens=False)

    def _scores(self, output: CompletionOutput, start: int, end: int) -> Any:
        """Return the logprobs of some tokens, if they were asked for."""
        if output.logprobs is None or not self._body.n_probs:
            return UNSET
        top, entries = self._body.n_probs, shapes.between(output.logprobs, start, end)
        ids = output.token_ids[start:end]
        return later(self._drawn(i, entry, top) for i, entry in zip(ids, entries, strict=True))

    def _drawn(self, token_id: int, entry: TokenIdLogprobs, top: int) -> DrawnToken:
        others = [ScoredToken(**self._scored(i, each.logprob)) for i, each in shapes.best(entry, top)]
        return DrawnToken(**self._scored(token_id, entry[token_id].logprob), top_logprobs=others)

    def _scored(self, token_id: int, logprob: float) -> dict[str, Any]:
        tokenizer = self._api.tokenizer
        return {
            "id": token_id,
            "token": tokenizer.spelled(token_id)[0],
            "bytes": list(tokenizer.token_bytes(token_id)),
            "logprob": shapes.finite(logprob),
        }


def _size(run: Run) -> int:
    """Return the number of entries of an answer's last part, roughly: scores, biases and the prompt's tokens."""
    return run.entries + len(run.asked.prompt_token_ids) + len(run.asked.params.logit_bias or ())


def _stop_of(output: CompletionOutput) -> tuple[Literal["eos", "limit", "word"], str]:
    """Return the reason for the end in llama.cpp's words, and the stop string."""
    if shapes.finish_reason(output) == "length":
        return "limit", ""
    word = output.stop_reason if isinstance(output.stop_reason, str) else ""
    return ("word" if word else "eos"), word


def _timings(run: Run) -> Timings:
    """Return the times of a request; those that are not known are 0."""
    [ended] = run.endings
    reading, writing = (0.0, 0.0) if ended is None else _seconds(ended.stats)
    usage = run.usage
    read = usage.prompt - usage.cached
    return Timings(
        cache_n=usage.cached,
        prompt_n=read,
        prompt_ms=MILLI * reading,
        prompt_per_token_ms=MILLI * reading / max(read, 1),
        prompt_per_second=read / max(reading, SHORTEST),
        predicted_n=usage.completion,
        predicted_ms=MILLI * writing,
        predicted_per_token_ms=MILLI * writing / max(usage.completion, 1),
        predicted_per_second=usage.completion / max(writing, SHORTEST),
    )


def _seconds(stats: RequestStats) -> tuple[float, float]:
    if stats.first_scheduled is None or stats.first_token is None:
        return 0.0, 0.0
    return stats.first_token - stats.first_scheduled, stats.finished - stats.first_token
