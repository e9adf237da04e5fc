"""An engine over a real worker, driven by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from torch import Tensor

from ridgeline.assembly import assemble
from ridgeline.core.plan.embeds import Inserted
from ridgeline.core.plan.request import Preemption, Request, SamplingParams, TokenLogprobs, TokenMask
from ridgeline.core.plan.step import StepResult
from ridgeline.core.settings.config import LLMConfig
from ridgeline.engine.engine import Engine
from ridgeline.worker.local import LocalWorker
from ridgeline.worker.runner import Runner


@dataclass
class Outcome:
    """What came of one request. scored: its tokens with their logprobs, where they were asked for. prompt: the same for
    its prompt, the likeliest tokens' too."""

    tokens: list[int] = field(default_factory=list)
    scored: list[tuple[int, float]] = field(default_factory=list)
    prompt: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None


class Rig:
    """worker and runner are the engine's own. results: everything the worker returned."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.worker: LocalWorker = engine._worker  # type: ignore[assignment]
        self.runner: Runner = getattr(self.worker, "_runner", None)  # type: ignore[assignment]  # other processes have it
        self.results: list[StepResult] = []
        self.outcomes: dict[str, Outcome] = {}
        collect = self.worker.collect

        def recording() -> StepResult:
            self.results.append(collect())
            return self.results[-1]

        self.worker.collect = recording  # type: ignore[method-assign]

    @property
    def errors(self) -> list[str]:
        return [result.error for result in self.results if result.error]

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.engine.add(request)
            self.outcomes[request.id] = Outcome()

    def step(self) -> None:
        for event in self.engine.step():
            outcome = self.outcomes[event.request_id]
            if event.token_id >= 0:
                outcome.tokens.append(event.token_id)
            if event.token_id >= 0 and event.logprobs is not None:
                outcome.scored.append((event.token_id, float(event.logprobs.logprob)))
            outcome.prompt += event.prompt_logprobs or ()
            outcome.finish_reason, outcome.error = event.finish_reason, event.error

    def run(self, *requests: Request) -> dict[str, Outcome]:
        """Add the requests and step until nothing is left."""
        self.add(*requests)
        for _ in range(1000):
            if not self.engine.has_work:
                return self.outcomes
            self.step()
        raise AssertionError("the engine does not come to an end")


def disturbed(own: Rig, draw: Random, *, gives_way: float, leaves: float) -> set[str]:
    """Step until nothing is left, while requests give way by chance, twelve times at most, and others leave. Return the
    ids of those that left."""
    scheduler, left = own.engine.scheduler, set[str]()
    for _ in range(2000):
        if not own.engine.has_work:
            break
        running = sorted(scheduler.running.leaders(), key=lambda seq: seq.id)
        if running and draw.random() < gives_way and scheduler.preemptions.total() < 12:
            scheduler._preempt(draw.choice(running), Preemption.BLOCKS)
        elif running and draw.random() < leaves:
            left.add(leaver := draw.choice(running).id)
            own.engine.abort(leaver)
        own.step()
    assert not own.engine.has_work
    assert scheduler.preemptions.total() > 3
    return left


@contextmanager
def rig(folder: Path, **settings: Any) -> Iterator[Rig]:
    """An engine on the CPU in float32 with debug checks and small steps, unless `settings` say otherwise. On a GPU it
    takes a little memory for its cache, and not all that is free, since other tests run beside it. It compiles its own
    kernels: those of a tiny model are few, and processes that do so start longer than that takes."""
    options = {"max_num_batched_tokens": 32, "block_size": 4, "max_num_seqs": 4, **settings}
    if options.get("device") == "cuda":
        options.setdefault("kv_cache_memory", 1 << 26)
    config = LLMConfig(model=folder, **{"dtype": "float32", "device": "cpu", "debug_checks": True, **options})
    with patch("ridgeline.assembly.device.processes_needed", lambda *_: 0):
        engine = assemble(config).engine
    try:
        yield Rig(engine)
    finally:
        engine.shutdown()


def ask(
    name: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    mask: TokenMask | None = None,
    stop_ids: frozenset[int] = frozenset(),
    seed: int = 0,
    lookahead: int | None = None,
    **params: Any,
) -> Request:
    """A greedy request that no end-of-sequence id ends, unless `params` say otherwise."""
    return Request(
        id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, **params}),
        seed=seed,
        max_total_tokens=len(prompt) + max_tokens,
        stop_ids=stop_ids,
        token_mask=mask,
        lookahead=lookahead if lookahead is not None else 2 if mask is None else 1,
    )


def ask_with(
    name: str, parts: Iterable[Any], placed: Callable[[Any, int], tuple[list[int], list[Inserted]]], **params: Any
) -> Request:
    """A request whose prompt is made of lists of tokens and of others. placed: the tokens and the vectors of one of
    these, by it and the number of its first token."""
    tokens, inserted = list[int](), list[Inserted]()
    for part in parts:
        own, vectors = (part, []) if isinstance(part, list) else placed(part, len(tokens))
        tokens += own
        inserted += vectors
    return replace(ask(name, tokens, **params), inserted=tuple(inserted))


def likeliest(ids: Sequence[int], count: int, scores: Callable[[list[int]], Tensor]) -> list[int]:
    """So many tokens behind others, each of them the likeliest by the scores [T, V] of all tokens before it."""
    found = list(ids)
    for _ in range(count):
        found.append(int(scores(found)[-1].argmax()))
    return found[-count:]


def alone(folder: Path, request: Callable[[], Request] | Request) -> list[int]:
    """The request's tokens when nothing else runs."""
    with rig(folder) as own:
        [outcome] = own.run(request() if callable(request) else request).values()
        return outcome.tokens
