"""Pooling offline: texts of one call run on the engine together, and become results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ridgeline.core.errors import InvalidRequest, RidgelineError
from ridgeline.core.plan.adapters import UsedAdapter
from ridgeline.core.plan.request import Request, RequestStats
from ridgeline.core.specs.pooling import PoolingParams, PoolingSpec
from ridgeline.engine.protocol import RunsRequests
from ridgeline.interrupts import uninterrupted
from ridgeline.offline.jobs import check_keys
from ridgeline.offline.media import CallersMedia
from ridgeline.progress import batch_bar
from ridgeline.text.arguments import integers, listed_prompts, short
from ridgeline.text.media_prompt import expanded, expanded_ids, lone_picture
from ridgeline.text.pooled import (
    Encoded,
    Encoder,
    RerankResult,
    ScoringOutput,
    ScoringRequestOutput,
    check_scores,
    finished,
    listed_tokens,
    paired,
    pooling_request,
    similarity,
)

Adapters = UsedAdapter | Sequence[UsedAdapter | None] | None  # of all prompts, or of each
NO_TOKENIZER = "this LLM was built with skip_tokenizer_init; give prompts as token ids."


class Pooled(NamedTuple):
    """A prompt with its vector, or those of its tokens."""

    request: Request
    vector: np.ndarray
    cached_tokens: int


Output = TypeVar("Output")  # a result
Held = TypeVar("Held")  # what it holds


def outputs(
    kind: Callable[[str, Held, list[int], int], Output], found: Sequence[Pooled], inner: Callable[[np.ndarray], Held]
) -> list[Output]:
    """Return the results of a call. inner: makes of a vector what they hold."""
    return [
        kind(each.request.id, inner(each.vector), list(each.request.prompt_token_ids), each.cached_tokens)
        for each in found
    ]


def scored_output(ran: Sequence[Pooled], score: float) -> ScoringRequestOutput:
    """Return the result of a pair. Its tokens are those of all that was run for it."""
    tokens = [token for each in ran for token in each.request.prompt_token_ids]
    cached = sum(each.cached_tokens for each in ran)
    return ScoringRequestOutput(ran[0].request.id, ScoringOutput(score), tokens, cached)


def reranked(documents: Sequence[str], scores: Sequence[float], top_n: int | None) -> list[RerankResult]:
    """Return documents, the most relevant first. Equal ones keep their order. Raise InvalidRequest."""
    if top_n is not None and (not isinstance(top_n, int) or isinstance(top_n, bool) or top_n < 0):
        raise InvalidRequest(f"top_n must be a whole number from 0, got {short(top_n)}.", param="top_n")
    found = [
        RerankResult(index, text, score) for index, (text, score) in enumerate(zip(documents, scores, strict=True))
    ]
    found.sort(key=lambda each: -each.relevance_score)
    return found[: top_n or None]


def with_options(params: Any, options: Mapping[str, Any]) -> Any:
    """Return the parameters, or each of a list of them, with these options instead of their own."""
    if params is None or isinstance(params, PoolingParams):
        return replace(params or PoolingParams(), **options)
    if not isinstance(params, Iterable):
        return params
    return [replace(each, **options) if isinstance(each, PoolingParams) else each for each in params]


class PoolingRuns:
    """The calls to a model that pools. encoder: None without a tokenizer. media: the reader of pictures."""

    def __init__(
        self, engine: RunsRequests, spec: PoolingSpec, encoder: Encoder | None, media: CallersMedia | None = None
    ) -> None:
        self._engine, self.spec, self._encoder, self._media = engine, spec, encoder, media or CallersMedia()
        self._count = 0
        self._turn = Lock()
        self._stats: dict[str, RequestStats] = {}
        engine.on_finish(self._note)

    @property
    def encoder(self) -> Encoder:
        """The encoder of texts. Raise InvalidRequest if there is none."""
        if self._encoder is None:
            raise InvalidRequest(NO_TOKENIZER, param="prompt")
        return self._encoder

    def embed(
        self,
        prompts: Any,
        params: Any,
        *,
        before: str = "",
        use_tqdm: bool = False,
        salt: str = "",
        adapters: Adapters = None,
    ) -> list[Pooled]:
        """Run texts or token ids, each with the text `before` in front."""
        listed = listed_prompts(prompts)
        every = _listed_params(params, len(listed))
        encoded = [self._encoded(prompt, each, before) for prompt, each in zip(listed, every, strict=True)]
        return self.run(encoded, every, use_tqdm=use_tqdm, salt=salt, adapters=adapters)

    def score(
        self,
        queries: Any,
        documents: Any,
        params: PoolingParams,
        *,
        instruction: str | None = None,
        use_tqdm: bool = False,
        salt: str = "",
        adapter: UsedAdapter | None = None,
    ) -> list[tuple[list[Pooled], float]]:
        """Return the score of each pair, with what was run for it: the pair, or its two texts by themselves."""
        check_scores(self.spec)
        params = replace(params, task=self.spec.task)
        firsts, seconds = listed_prompts(queries), listed_prompts(documents)
        pairs = paired(firsts, seconds)
        if self.spec.task == "classify":
            encoded = [self.encoder.pair(_text(a), _text(b), params, instruction=instruction) for a, b in pairs]
            found = self.run(encoded, [params] * len(pairs), use_tqdm=use_tqdm, salt=salt, adapters=adapter)
            return [([each], float(each.vector[0])) for each in found]
        if instruction is not None:
            raise InvalidRequest("instruction is for rerankers; leave it out.", param="instruction")
        if self.spec.task == "token_embed":
            return self._compared(firsts, seconds, params, use_tqdm=use_tqdm, salt=salt, adapter=adapter)
        before = self._encoder.prompt(None) if self._encoder else ""
        texts = [*firsts, *seconds]
        both = self.embed(texts, params, before=before, use_tqdm=use_tqdm, salt=salt, adapters=adapter)
        left, right = both[: len(firsts)], both[len(firsts) :]
        return [([a, b], similarity(a.vector, b.vector)) for a, b in paired(left, right)]

    def _compared(
        self,
        firsts: list[Any],
        seconds: list[Any],
        params: PoolingParams,
        *,
        use_tqdm: bool,
        salt: str,
        adapter: UsedAdapter | None,
    ) -> list[tuple[list[Pooled], float]]:
        """Return the score of each pair by the vectors of its tokens, with what was run for it."""
        encoder = self.encoder
        encoded = [encoder.side(_text(text), "query", params) for text in firsts]
        encoded += [encoder.side(_text(text), "document", params) for text in seconds]
        both = self.run(encoded, [params] * len(encoded), use_tqdm=use_tqdm, salt=salt, adapters=adapter)
        left, right = both[: len(firsts)], both[len(firsts) :]
        return [
            ([a, b], encoder.late_similarity(a.vector, b.vector, b.request.prompt_token_ids))
            for a, b in paired(left, right)
        ]

    def run(
        self,
        prompts: Sequence[Encoded],
        params: Sequence[PoolingParams],
        *,
        use_tqdm: bool = False,
        salt: str = "",
        adapters: Adapters = None,
    ) -> list[Pooled]:
        """Run prompts to their ends; calls of other threads come after that. Raise InvalidRequest, before anything
        runs, if one of them cannot run."""
        listed = [adapters] * len(prompts) if adapters is None or isinstance(adapters, UsedAdapter) else adapters
        with self._turn:
            requests = []
            for encoded, each, adapter in zip(prompts, params, listed, strict=True):
                self._count += 1
                request = pooling_request(str(self._count), encoded, each, self.spec, cache_salt=salt)
                requests.append(request if adapter is None else adapter.of(request))
            for request in requests:
                self._engine.check(request)
            vectors = self._run(requests, use_tqdm)
        return [
            self._pooled(request, vectors[request.id], each) for request, each in zip(requests, params, strict=True)
        ]

    def _pooled(self, request: Request, vector: np.ndarray, params: PoolingParams) -> Pooled:
        done = finished(vector, params, self.spec, request.prompt_token_ids)
        return Pooled(request, done, self._stats.pop(request.id).cached_tokens)

    def _run(self, requests: Sequence[Request], use_tqdm: bool) -> dict[str, np.ndarray]:
        """Return the raw vectors by request. Requests that are left when an error or Ctrl-C comes are aborted."""
        engine, found = self._engine, dict[str, np.ndarray]()
        try:
            with batch_bar(len(requests), shown=use_tqdm) as bar:
                with uninterrupted():
                    for request in requests:
                        engine.add(request, checked=True)
                while len(found) < len(requests):
                    with uninterrupted():
                        events = engine.step()
                    for event in events.events:
                        if event.vector is None:
                            raise RidgelineError(event.error or "a request ended without a vector.")
                        found[event.request_id] = event.vector
                        bar.advance(0, finished=True)
        finally:
            with uninterrupted():
                for request in requests:
                    engine.abort(request.id)
                while engine.has_work:
                    engine.step()
        return found

    def _encoded(self, prompt: Any, params: PoolingParams, before: str) -> Encoded:
        if isinstance(prompt, str):
            return self.encoder.one(before + prompt, params)
        given: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {}
        check_keys(given)
        text, ids = given.get("prompt"), given.get("prompt_token_ids")
        if given.get("multi_modal_data"):
            return self._with_pictures(text, ids, given)
        if isinstance(text, str) and ids is None:
            return self.encoder.one(before + text, params)
        return listed_tokens(ids, params, self._engine.config.max_model_len)

    def _with_pictures(self, text: Any, ids: Any, prompt: Mapping[str, Any]) -> Encoded:
        """Return a prompt with pictures, or that is one. Raise InvalidRequest."""
        processor = self._media.processor(prompt.get("mm_processor_kwargs"))
        items = self._media.items_of(prompt["multi_modal_data"], processor)
        if not self.spec.apart:
            tokenizer = self.encoder.tokenizer
            if ids is not None:
                made = expanded_ids(integers(ids), tokenizer, processor, items)
            else:
                made = expanded(_text(text), tokenizer, processor, items)
            return Encoded(made.token_ids, inserted=made.inserted)
        if text or ids:
            raise InvalidRequest(
                "this model embeds a text or a picture, and a prompt has both; give each its own prompt.",
                param="multi_modal_data",
            )
        return lone_picture(processor, items)

    def _note(self, request: Request, stats: RequestStats) -> None:
        self._stats[request.id] = stats


def _text(prompt: Any) -> str:
    if not isinstance(prompt, str):
        raise InvalidRequest(f"a pair is made of texts, got {short(prompt)}.", param="text_2")
    return prompt


def _listed_params(params: Any, count: int) -> list[PoolingParams]:
    """Return one PoolingParams for each prompt, from one for all or a list of them. Raise InvalidRequest."""
    if params is None or isinstance(params, PoolingParams):
        return [params or PoolingParams()] * count
    listed = list(params) if isinstance(params, Iterable) else [params]
    if len(listed) != count or not all(isinstance(each, PoolingParams) for each in listed):
        raise InvalidRequest(
            f"pooling_params is a PoolingParams or a list of {count} of them, one per prompt, got {short(params)}.",
            param="pooling_params",
        )
    return listed
