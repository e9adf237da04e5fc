"""The five workloads, as data: the requests, their order, and how figures follow from the measured times.

    W1 mixed    256 requests, prompt and output U[100, 1024], temperature 0.6, twice: output tokens/s
    W2 single   one request, prompt 128, 257 tokens out: time to first token, time per output token
    W3 decode   8, 64 and 256 requests with 1024 tokens of prompt each, 128 steps: milliseconds a step
    W4 prefill  1×1024, 1×8192, 1×30000, 8×8192: milliseconds until the first tokens, best of three
    W5 prefix   512 requests that share 2048 tokens and bring 128 of their own, 64 tokens out: output tokens/s

Prompts are uniform random token ids. The seeds and the order of the draws are fixed, so every engine, on every machine,
gets the same ids and lengths. There is no torch here, because peers' processes import this file.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.core.errors import InvalidConfig

TOKEN_RANGE = 100_000  # ids are drawn below this, or below the vocabulary's size if that is smaller

PROCESSOR = ", processor"  # ends the names of metrics that follow of processor time

Times = Mapping[str, float]  # phase name → seconds


class Metric(NamedTuple):
    """One figure. `samples` are the repetitions that `value` was made from, in the same unit. `better`: "lower",
    "higher", or "neither" where the figure says how another one came about."""

    name: str
    value: float
    unit: str
    better: str = "lower"
    samples: tuple[float, ...] = ()


@dataclass(frozen=True)
class Phase:
    """One timed call: every prompt gets exactly its `max_tokens` (end-of-sequence is ignored)."""

    name: str
    prompts: Sequence[Sequence[int]]
    max_tokens: Sequence[int]
    temperature: float = 0.0

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its output."""
        return max(len(p) + n for p, n in zip(self.prompts, self.max_tokens, strict=True))


@dataclass(frozen=True)
class Workload:
    """A workload. Its phases run in order; `metrics` turns their seconds into figures, of measured times and of limits
    alike."""

    name: str
    phases: tuple[Phase, ...]
    metrics: Callable[[Times], list[Metric]]

    @property
    def longest(self) -> int:
        return max(phase.longest for phase in self.phases)


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of workloads. `scale` is a factor on request counts and lengths (0.1 is about a hundredth of the work),
    and `vocab_size` is the model's."""

    scale: float = 1.0
    vocab_size: int = TOKEN_RANGE

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise InvalidConfig(f"--scale must be above 0 and at most 1, got {self.scale!r}.")

    def __call__(self, count: int) -> int:
        return max(1, round(count * self.scale))

    def tokens(self, count: int, rng: random.Random) -> list[int]:
        bound = min(TOKEN_RANGE, self.vocab_size)
        return [rng.randrange(0, bound) for _ in range(count)]


def warm_up(size: Size) -> Phase:
    """Return the first request that an engine sees: eight tokens in, two out."""
    return Phase("first", [size.tokens(8, random.Random(0))], [2])


def mixed(size: Size) -> Iterator[Workload]:
    def phase(seed: int) -> Phase:
        rng, low, high = random.Random(seed), size(100), size(1024)
        count = size(256)
        prompts = [size.tokens(rng.randint(low, high), rng) for _ in range(count)]
        return Phase(f"rep{seed}", prompts, [rng.randint(low, high) for _ in range(count)], temperature=0.6)

    phases = (phase(0), phase(1))

    def metrics(times: Times) -> list[Metric]:
        samples = tuple(sum(p.max_tokens) / times[p.name] for p in phases)
        total = sum(sum(p.max_tokens) for p in phases) / sum(times[p.name] for p in phases)
        return [Metric("output", total, "tokens/s", "higher", samples)]

    yield Workload("W1", phases, metrics)


def single(size: Size) -> Iterator[Workload]:
    """Yield the workload. The prompts of both phases differ, because the second would otherwise find the first's in the
    prefix cache."""
    steps, phases = size(256), []
    for repetition in range(2):
        rng = random.Random(100 + repetition)
        phases.append(Phase(f"first{repetition}", [size.tokens(size(128), rng)], [1]))
        phases.append(Phase(f"all{repetition}", [size.tokens(size(128), rng)], [1 + steps]))

    def metrics(times: Times) -> list[Metric]:
        ttft = tuple(1e3 * times[f"first{r}"] for r in range(2))
        tpot = tuple(1e3 * (times[f"all{r}"] - times[f"first{r}"]) / steps for r in range(2))
        return [Metric("tpot", min(tpot), "ms", samples=tpot), Metric("ttft", min(ttft), "ms", samples=ttft)]

    yield Workload("W2", tuple(phases), metrics)


def decode(size: Size) -> Iterator[Workload]:
    """Yield the workloads. The prompts are run once cold, then with and without 128 more tokens, both times out of the
    prefix cache."""
    steps = size(128)
    for batch in (8, 64, 256):
        rng, count = random.Random(200 + batch), size(batch)
        prompts = [size.tokens(size(1024), rng) for _ in range(count)]
        phases = (
            Phase("cold", prompts, [1] * count),
            Phase("steps", prompts, [1 + steps] * count),
            Phase("first", prompts, [1] * count),
        )

        def metrics(times: Times, batch: int = batch) -> list[Metric]:
            return [Metric(f"step b{batch}", 1e3 * (times["steps"] - times["first"]) / steps, "ms")]

        yield Workload(f"W3-b{batch}", phases, metrics)


def prefill(size: Size) -> Iterator[Workload]:
    for length, count in ((1024, 1), (8192, 1), (30_000, 1), (8192, 8)):
        phases = []
        for repetition in range(3):
            rng = random.Random(300 + length + 7 * repetition + count)
            prompts = [size.tokens(size(length), rng) for _ in range(count)]
            phases.append(Phase(f"rep{repetition}", prompts, [1] * count))

        def metrics(times: Times, what: str = f"{count}x{length}") -> list[Metric]:
            samples = tuple(1e3 * seconds for seconds in times.values())
            return [Metric(f"prefill {what}", min(samples), "ms", samples=samples)]

        yield Workload(f"W4-{count}x{length}", tuple(phases), metrics)


def prefix(size: Size) -> Iterator[Workload]:
    rng = random.Random(5)
    shared, count, out = size.tokens(size(2048), rng), size(512), size(64)
    phase = Phase("all", [shared + size.tokens(size(128), rng) for _ in range(count)], [out] * count)

    def metrics(times: Times) -> list[Metric]:
        return [Metric("output", count * out / times["all"], "tokens/s", "higher")]

    yield Workload("W5", (phase,), metrics)


WORKLOADS: dict[str, Callable[[Size], Iterator[Workload]]] = {
    "W1": mixed,
    "W2": single,
    "W3": decode,
    "W4": prefill,
    "W5": prefix,
}


def workloads(only: Iterable[str], size: Size) -> Iterator[Workload]:
    """Yield the named workloads (all if none is named), made one by one, because the prompts of all together are large.

    W3 and W4 are several (`W3-b8`, …) and may be named whole or one by one. Raise InvalidConfig for unknown names.
    """
    names = list(only) or list(WORKLOADS)
    for name in names:
        family, _, member = name.partition("-")
        if family not in WORKLOADS:
            raise InvalidConfig(f"unknown workload {name!r}; known: {', '.join(WORKLOADS)}.")
        made = [w for w in WORKLOADS[family](size) if not member or w.name == name]
        if not made:
            raise InvalidConfig(
                f"unknown workload {name!r}; known: {', '.join(w.name for w in WORKLOADS[family](size))}."
            )
        yield from made


def uniform(count: int, input_len: int, output_len: int, size: Size, *, seed: int = 0) -> Workload:
    """Return `count` requests of one length, all at once: output, total tokens/s and requests/s."""
    rng = random.Random(seed)
    phase = Phase("all", [size.tokens(input_len, rng) for _ in range(count)], [output_len] * count)

    def metrics(times: Times) -> list[Metric]:
        rates = {"output": output_len, "total": input_len + output_len}
        figures = [Metric(name, count * n / times["all"], "tokens/s", "higher") for name, n in rates.items()]
        return [*figures, Metric("requests", count / times["all"], "requests/s", "higher")]

    return Workload("throughput", (phase,), metrics)


def decoded(count: int, input_len: int, output_len: int, size: Size, *, seed: int = 0) -> Workload:
    """Return `count` requests of one length that run to their first tokens, and others that run to their last: the
    milliseconds of both, whose difference is that of the decode steps."""
    rng, outputs = random.Random(seed), {"prompts": 1, "whole": output_len}
    phases = tuple(
        Phase(name, [size.tokens(input_len, rng) for _ in range(count)], [tokens] * count)
        for name, tokens in outputs.items()
    )
    return Workload("decoded", phases, lambda times: [Metric(name, 1e3 * times[name], "ms") for name in outputs])
