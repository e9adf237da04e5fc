"""An engine that is driven step by step, with the moment of every token: for requests that come while others run."""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import ridgeline
from ridgeline.core.plan.request import Request, SamplingParams
from ridgeline_bench.scripts.apart import drawn


class Wanted(NamedTuple):
    """A request. at: seconds after the start of the run at which it comes."""

    prompt: Sequence[int]
    tokens: int
    at: float = 0.0


@dataclass
class Answered:
    """The moments of a request's tokens, in seconds after the start of the run. at: when it came."""

    at: float
    moments: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.moments[0] - self.at

    @property
    def between(self) -> list[float]:
        return [b - a for a, b in pairwise(self.moments)]


@dataclass(frozen=True)
class Run:
    """The outcome of some requests. seconds: until the last token. steps: those that the engine took."""

    answers: list[Answered]
    seconds: float
    steps: int

    @property
    def tokens(self) -> int:
        return sum(len(each.moments) for each in self.answers)

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds

    @property
    def first(self) -> float:
        """The median of the seconds to the first token."""
        return statistics.median(each.first for each in self.answers)


class Driven:
    """A loaded model. Prompts are random tokens, and no output ends early."""

    def __init__(self, model: str, **options: Any) -> None:
        self.llm = ridgeline.LLM(model, **{"skip_tokenizer_init": True, "seed": 0, "capture_at_start": True, **options})
        self.engine = self.llm.assembly.engine
        self.slots = self.llm.engine.config.max_num_seqs
        self._vocabulary = self.llm.assembly.model.spec.vocab_size
        self._draw, self._made = random.Random(0), 0

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Return prompts that differ from all before, so that the prefix cache has none of them."""
        return drawn(self._draw, count, length, self._vocabulary)

    def alike(self, count: int, length: int, tokens: int) -> list[Wanted]:
        """Return requests of one length that come at once."""
        return [Wanted(prompt, tokens) for prompt in self.prompts(count, length)]

    def run(self, work: Sequence[Wanted]) -> Run:
        """Run requests to their ends. Raise RuntimeError if the engine reports an error."""
        waiting = deque(sorted(work, key=lambda each: each.at))
        answers: dict[str, Answered] = {}
        steps, clock = 0, self.clock()
        while waiting or self.engine.has_work:
            now = clock()
            while waiting and waiting[0].at <= now:
                wanted = waiting.popleft()
                answers[self.add(wanted)] = Answered(wanted.at)
            if not self.engine.has_work:
                time.sleep(max(0.0, waiting[0].at - now))
                continue
            self.step(answers, clock)
            steps += 1
        return Run(list(answers.values()), max(each.moments[-1] for each in answers.values()), steps)

    def clock(self) -> Callable[[], float]:
        """Return a function that tells the seconds from now on."""
        started = time.perf_counter()
        return lambda: time.perf_counter() - started

    def step(self, answers: Mapping[str, Answered], clock: Callable[[], float]) -> None:
        """Step the engine, and note when tokens came."""
        events = self.engine.step()
        now = clock()
        for event in events:
            if event.error is not None:
                raise RuntimeError(f"the engine reports {event.error}")
            if event.token_id >= 0:
                answers[event.request_id].moments.append(now)

    def step_seconds(self, batch: int, length: int, tokens: int, rounds: int = 3) -> float:
        """Return the seconds of a step in which `batch` requests decode a token each, the least of some rounds: the
        mean from the moment at which all have their first tokens to the end."""
        found = []
        for _ in range(rounds):
            answers = self.run(self.alike(batch, length, tokens)).answers
            begun, ended = (max(each.moments[n] for each in answers) for n in (0, -1))
            steps = min(sum(moment > begun for moment in each.moments) for each in answers)
            found.append((ended - begun) / max(1, steps))
        return min(found)

    def close(self) -> None:
        self.llm.shutdown()

    def add(self, wanted: Wanted) -> str:
        """Give the engine a request, and return its id."""
        self._made += 1
        name, prompt = str(self._made), tuple(wanted.prompt)
        params = SamplingParams(temperature=0.0, max_tokens=wanted.tokens, ignore_eos=True, detokenize=False)
        self.engine.add(
            Request(
                id=name, prompt_token_ids=prompt, params=params, seed=0, max_total_tokens=len(prompt) + wanted.tokens
            )
        )
        return name
