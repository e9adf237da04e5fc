"""Continuous batching beside static batching: the same requests, engine and slots.

    python -m ridgeline_bench.scripts.batching [--model FOLDER] [--slots 64] [--requests 256] [--input 128] [--mean 128]
        [--options JSON] [--quick] [--output FILE.jsonl]

FOLDER has a config.json; the default is Llama-3.1-8B's shape with random weights. All requests are there
at the start, with prompts of one length and outputs whose lengths are lognormal, with a deviation as large as the mean.

    static, padded   batches of --slots requests. Each runs until its longest output is complete, and shorter outputs
                     are computed on and thrown away: a loop around generate() of a library without early ends.
    static           the same batches, but a row that is complete leaves. Its slot stays empty until the batch ends.
    continuous       a slot takes the next request as soon as it is free (Orca, Yu et al., OSDI 2022).

"steps" are those of the engine, and "at least" what arithmetic allows: a step brings a slot at most one token. Latency
is from the start to a request's last token.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline_bench.results import gpu
from ridgeline_bench.scripts.asked import asked, keep
from ridgeline_bench.scripts.driven import Driven, Run, Wanted

SHAPES = Path(__file__).parents[2] / "benchmarks" / "models"


def lengths(count: int, mean: float, seed: int = 0) -> list[int]:
    """Return lognormal lengths with this mean and as large a deviation, at most eight times the mean."""
    draw, variance = random.Random(seed), math.log(2.0)  # ln(1 + (deviation / mean)²)
    drawn = (draw.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance)) for _ in range(count))
    return [max(1, min(round(8 * mean), round(length))) for length in drawn]


def batches(work: Sequence[Wanted], slots: int) -> Iterator[Sequence[Wanted]]:
    return (work[start : start + slots] for start in range(0, len(work), slots))


@dataclass(frozen=True)
class Outcome:
    """seconds: until all are complete. latencies: of the requests. steps: of the engine. computed: tokens, those that
    were thrown away too."""

    seconds: float
    latencies: list[float]
    steps: int
    computed: int


def static(driven: Driven, work: Sequence[Wanted], slots: int, *, padded: bool) -> Outcome:
    """Run batch after batch."""
    seconds, steps, computed, latencies = 0.0, 0, 0, []
    for batch in batches(work, slots):
        longest = max(each.tokens for each in batch)
        run = driven.run([Wanted(each.prompt, longest if padded else each.tokens) for each in batch])
        # nobody gets a token of a padded batch before the batch is returned
        ends = [run.seconds if padded else answer.moments[-1] for answer in run.answers]
        latencies += [seconds + end for end in ends]
        seconds, steps, computed = seconds + run.seconds, steps + run.steps, computed + run.tokens
    return Outcome(seconds, latencies, steps, computed)


def continuous(driven: Driven, work: Sequence[Wanted]) -> Outcome:
    run: Run = driven.run(work)
    return Outcome(run.seconds, [answer.moments[-1] for answer in run.answers], run.steps, run.tokens)


def static_steps(outputs: Sequence[int], slots: int) -> int:
    """Return the least steps of static batches: each takes as many as its longest output has tokens."""
    return sum(max(outputs[start : start + slots]) for start in range(0, len(outputs), slots))


def continuous_steps(outputs: Sequence[int], slots: int) -> int:
    """Return the least steps of continuous batching in the order of arrival, where a step brings a slot one token."""
    free = [0] * slots
    for output in outputs:
        heapq.heapreplace(free, free[0] + output)
    return max(free)


def ways(driven: Driven, work: Sequence[Wanted], slots: int) -> Mapping[str, tuple[Callable[[], Outcome], int]]:
    """Return each way with its least steps."""
    outputs = [each.tokens for each in work]
    least = static_steps(outputs, slots)
    return {
        "static, padded": (lambda: static(driven, work, slots, padded=True), least),
        "static": (lambda: static(driven, work, slots, padded=False), least),
        "continuous": (lambda: continuous(driven, work), continuous_steps(outputs, slots)),
    }


def fresh(driven: Driven, work: Sequence[Wanted]) -> list[Wanted]:
    """Return the requests with other prompts, which no cache knows."""
    prompts = driven.prompts(len(work), len(work[0].prompt))
    return [Wanted(prompt, each.tokens) for prompt, each in zip(prompts, work, strict=True)]


def bench(driven: Driven, count: int, length: int, mean: float) -> list[dict[str, Any]]:
    """Return a line for each way. Batches are as large as the engine's."""
    slots = driven.slots
    work = [Wanted((), tokens) for tokens in lengths(count, mean)]
    work = [Wanted(prompt, each.tokens) for prompt, each in zip(driven.prompts(count, length), work, strict=True)]
    driven.run(driven.alike(slots, length, 4))  # kernels and code
    useful, found = sum(each.tokens for each in work), []
    for name in ("static, padded", "static", "continuous"):
        run, least = ways(driven, fresh(driven, work), slots)[name]
        outcome = run()
        line = {
            "way": name, "slots": slots, "requests": count, "input": length, "mean_output": useful / count,
            "tokens_per_second": useful / outcome.seconds, "seconds": outcome.seconds, "steps": outcome.steps,
            "least_steps": least, "wasted": 1 - useful / outcome.computed,
            "latency_mean_s": statistics.fmean(outcome.latencies),
        }  # fmt: skip
        found.append(line)
    return found


def main() -> None:
    a = asked(
        __doc__, model="", slots=64, requests=256, input=128, mean=128, options=("{}", "JSON of arguments of LLM"),
        quick=False, output=Path,
    )  # fmt: skip
    if a.quick:
        a.slots, a.requests, a.input, a.mean = 4, 16, 16, 12
    model = a.model or str(SHAPES / ("random-25m" if a.quick else "llama-8b"))
    longest = a.input + 8 * a.mean + 16
    given = {"load_format": "dummy", "max_model_len": longest, "max_num_seqs": a.slots, **json.loads(a.options)}
    driven = Driven(model, **given)
    table = Table("way", "tokens/s", "over static", "steps", "at least", "thrown away", "mean latency, s")
    lines = bench(driven, a.requests, a.input, a.mean)
    for line in lines:
        keep(a.output, {"workload": "batching", "model": Path(model).name, "gpu": gpu(), "options": a.options, **line})
        table.add_row(
            line["way"], f"{line['tokens_per_second']:,.0f}", f"{lines[1]['seconds'] / line['seconds']:.2f}",
            str(line["steps"]), str(line["least_steps"]), f"{100 * line['wasted']:.0f} %",
            f"{line['latency_mean_s']:.2f}",
        )  # fmt: skip
    Console(width=140).print(table)
    driven.close()


if __name__ == "__main__":
    main()
