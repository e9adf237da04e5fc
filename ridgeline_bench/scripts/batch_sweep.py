"""The batch at which decoding turns from memory-bound to compute-bound: measured, and as the planner says.

    python -m ridgeline_bench.scripts.batch_sweep [--model FOLDER] [--batches 1 2 4 … 512 768] [--context 16]
        [--input 512] [--options JSON] [--quick] [--output FILE.jsonl]
    python -m ridgeline_bench.scripts.batch_sweep --draw FILE.jsonl OUT.svg       a picture of stored lines

FOLDER has a config.json; the default is Llama-3.1-8B's shape with random weights. For each batch so many
requests decode at once, with --context tokens of prompt, so that the cache is small beside the weights. While a step
reads the weights and little else, it takes the same time for every batch; once products take longer to compute than
to read, its time grows with the batch.

    measured crossover   where the line through the two largest batches meets the time of a step of one request
    planner's            the fewest tokens for which the products of all layers take longer to compute than to read
    limit                a step's least time by the planner; its own crossover is found in the same way

TTFT is measured up to 64 requests at once, each with --input tokens: the median, and the last one's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.hardware import Hardware
from ridgeline.perf.planner import Deployment, Plan
from ridgeline.perf.roofline import Roofline
from ridgeline.worker.machine import hardware_of
from ridgeline_bench.results import gpu
from ridgeline_bench.scripts.asked import asked, keep
from ridgeline_bench.scripts.batching import SHAPES
from ridgeline_bench.scripts.driven import Driven
from ridgeline_bench.serving.plot import Curve, Panel, picture

BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768]
TOKENS, LARGEST_TTFT = 33, 64


def crossover(seconds: dict[int, float]) -> float | None:
    """Return the batch at which the line through the two largest batches meets the time of the smallest; None if the
    times of the largest do not grow with the batch.

    seconds: of a step, by batch; at least three.
    """
    *_, low, high = sorted(seconds)
    slope = (seconds[high] - seconds[low]) / (high - low)
    flat = seconds[min(seconds)]
    if slope <= 0 or seconds[high] <= 1.2 * flat:
        return None
    return max(1.0, low + (flat - seconds[low]) / slope)


@dataclass(frozen=True)
class Limits:
    """The planner's figures: seconds of a step by batch, and its crossover in tokens. Empty for unknown hardware."""

    seconds: dict[int, float]
    tokens: int | None


def limits(driven: Driven, hardware: Hardware | None, batches: Iterable[int], context: int) -> Limits:
    assembly = driven.llm.assembly
    if hardware is None:
        return Limits({}, None)
    try:
        model = Roofline(assembly.model.spec, hardware, assembly.precision)
        seconds = {b: model.step_limit(StepShape([1] * b, [context] * b, b)) for b in batches}
        plan = Plan(Deployment(
            model=assembly.model.spec, hardware=hardware, input=context, output=1, dtype=assembly.precision
        ))  # fmt: skip
        return Limits(seconds, plan.crossover)
    except InvalidConfig:  # a rate that the calibration lacks
        return Limits({}, None)


def bench(driven: Driven, batches: Sequence[int], context: int, length: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Yield a line for each batch, as soon as it is measured."""
    found = limits(driven, hardware_of(driven.llm.assembly.device), batches, context + tokens // 2)
    for batch in batches:
        driven.run(driven.alike(batch, context, 3))  # kernels of this batch
        seconds = driven.step_seconds(batch, context, tokens)
        line: dict[str, Any] = {
            "batch": batch, "context": context, "input": length, "step_ms": 1e3 * seconds,
            "tokens_per_second": batch / seconds, "limit_ms": 1e3 * found.seconds.get(batch, 0.0),
            "planner_crossover": found.tokens,
        }  # fmt: skip
        if batch <= LARGEST_TTFT and length:
            firsts = sorted(answer.first for answer in driven.run(driven.alike(batch, length, 1)).answers)
            line |= {"ttft_ms": 1e3 * firsts[len(firsts) // 2], "ttft_last_ms": 1e3 * firsts[-1]}
        yield line


def crossovers(lines: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return the three crossovers of some lines, in tokens."""
    measured = crossover({line["batch"]: line["step_ms"] for line in lines})
    known = all(line["limit_ms"] for line in lines)
    limit = crossover({line["batch"]: line["limit_ms"] for line in lines}) if known else None
    return {"measured": measured, "limit": limit, "planner": lines[0]["planner_crossover"]}


def draw(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a picture: the time of a step and the tokens per second over the batch, measured and at the limit."""
    limited = [line for line in lines if line["limit_ms"]]
    times = [
        Curve("measured", [(line["batch"], line["step_ms"]) for line in lines], 0, 0),
        Curve("limit", [(line["batch"], line["limit_ms"]) for line in limited], 1, 1),
    ]
    rates = [
        Curve(curve.name, [(batch, 1e3 * batch / ms) for batch, ms in curve.places], curve.colour, curve.dash)
        for curve in times
    ]
    panels = [
        Panel(title, "requests that decode at once", [curve for curve in found if curve.places])
        for title, found in (("ms of a step", times), ("tokens/s", rates))
    ]
    path.write_text(picture(panels, f"{lines[0]['model']}, {lines[0]['gpu'] or 'CPU'}"), encoding="utf-8")


def show(lines: Sequence[dict[str, Any]]) -> None:
    table = Table("batch", "ms a step", "limit, ms", "of it", "tokens/s", "TTFT, ms", "last TTFT, ms")
    for line in lines:
        share = f"{100 * line['limit_ms'] / line['step_ms']:.0f} %" if line["limit_ms"] else "-"
        firsts = [f"{line[key]:.1f}" if key in line else "-" for key in ("ttft_ms", "ttft_last_ms")]
        table.add_row(
            str(line["batch"]), f"{line['step_ms']:.2f}", f"{line['limit_ms']:.2f}", share,
            f"{line['tokens_per_second']:,.0f}", *firsts,
        )  # fmt: skip
    console = Console(width=140)
    console.print(table)
    told = {name: "none" if at is None else f"{at:.0f} tokens" for name, at in crossovers(lines).items()}
    console.print(f"crossover: measured {told['measured']}, of the limits {told['limit']}, planner {told['planner']}")


def main() -> None:
    a = asked(
        __doc__, model="", batches=BATCHES, context=16, input=512, options=("{}", "JSON of arguments of LLM"),
        quick=False, output=Path, draw=([Path], "a file of stored lines, and the picture to write"),
    )  # fmt: skip
    if a.draw:
        source, target = a.draw
        stored = map(json.loads, source.read_text(encoding="utf-8").splitlines())
        draw([line for line in stored if line["workload"] == "batch sweep"], target)
        return
    tokens = TOKENS
    if a.quick:
        a.batches, a.input, tokens = [1, 2, 4, 8, 16, 32], 32, 5
    model = a.model or str(SHAPES / ("random-25m" if a.quick else "llama-8b"))
    longest = max(a.input + 16, a.context + tokens + 16)
    given = {"load_format": "dummy", "max_model_len": longest, "max_num_seqs": max(a.batches), **json.loads(a.options)}
    driven = Driven(model, **given)
    common = {"workload": "batch sweep", "model": Path(model).name, "gpu": gpu(), "options": a.options}
    lines = []
    for line in bench(driven, a.batches, a.context, a.input, tokens):
        keep(a.output, {**common, **line})
        lines.append(line)
    show(lines)
    driven.close()


if __name__ == "__main__":
    main()
