"""The tables of docs/engines.md, from stored results.

    python -m ridgeline_bench.scripts.engines_page

One is of `ridgeline bench compare` on a CPU, by processor time; the others are of `ridgeline profile --peer`, one for
each two engines whose lines follow each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ridgeline_bench.profile.beside import SHORT
from ridgeline_bench.results import Record, read
from ridgeline_bench.workloads import PROCESSOR

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
COMPARED, PROFILED = RESULTS / "engines-cpu.jsonl", RESULTS / "decode-steps.jsonl"
Line = Mapping[str, Any]


def compared(records: Sequence[Record]) -> list[str]:
    """Return a table with a column for each peer and a row for each metric: ours beside the peer's."""
    runs = [list(run) for _, run in groupby(records, key=lambda r: r.engine)]
    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    heads = [f"{theirs[0].engine} {theirs[0].version}" for _, theirs in pairs]
    rows = [f"| ours \\| theirs | {' | '.join(heads)} |", "|---" * (1 + len(pairs)) + "|"]
    for first in (r for r in runs[0] if r.metric.endswith(PROCESSOR)):
        name = f"{first.workload} {first.metric.removesuffix(PROCESSOR)}, {first.unit}"
        rows.append(f"| {name} | {' | '.join(_cell(first, *pair) for pair in pairs)} |")
    return rows


def _cell(what: Record, *sides: Sequence[Record]) -> str:
    values = [next(r.value for r in side if r.what == what.what) for side in sides]
    return " \\| ".join(f"{value:.3g}" for value in values)


def beside(own: Line, peer: Line) -> list[str]:
    """Return a table of a decode step of two engines."""
    sides = (own, peer)
    heads = [f"{side['engine']} {side['version']}" for side in sides]
    rows = [f"| a decode step | {' | '.join(heads)} |", "|---|---|---|"]
    rows += [f"| {name} | {' | '.join(values)} |" for name, *values in _figures(sides, gpu=bool(own["cuda"]))]
    return rows


def _figures(sides: tuple[Line, Line], *, gpu: bool) -> Iterator[list[str]]:
    named = {
        "the hardware's limit, ms": "limit_ms",
        "ms, without a profiler": "step_ms", "processor time, ms": "processor_ms", "ms, with a profiler": "traced_ms",
        "of that busy": "busy_ms",
        f"idle in pauses up to {SHORT:g} µs": "short_pauses_ms", "idle in longer pauses": "long_pauses_ms",
    }  # fmt: skip
    for name, key in named.items():
        if any(side[key] for side in sides):
            yield [name, *(f"{side[key]:.3f}" for side in sides)]
    yield ["idle", *(f"{100 * side['idle_share']:.1f} %" for side in sides)]
    yield ["kernels" if gpu else "operators", *(f"{side['kernels']:.1f}" for side in sides)]
    for name in sides[0]["calls"] if gpu else ():
        yield [name, *(f"{side['calls'][name]:.1f}" for side in sides)]
    for place in range(3):
        yield [f"number {place + 1}, ms a step", *(_kernel(side, place) for side in sides)]


def _kernel(side: Line, place: int) -> str:
    name, took, calls = side["top"][place]
    return f"`{name[:52]}`, {calls:.0f} calls: {took:.3f}"


def title(own: Line) -> str:
    """Return the model, the machine and the requests of two lines."""
    asked, machine = own["options"], own["machine"]
    shape = f"{asked['count']} requests, {asked['input_len']} tokens in, {asked['output_len']} out"
    return f"{own['model']}, {own['dtype']}, {machine['gpu'] or machine['cpu']}: {shape}"


def pairs(path: Path = PROFILED) -> list[tuple[Line, Line]]:
    """Return the lines of a file two by two."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return list(zip(lines[::2], lines[1::2], strict=True))


def main() -> None:
    print(*compared(read([COMPARED])), sep="\n")
    for own, peer in pairs():
        print("", title(own), "", *beside(own, peer), sep="\n")


if __name__ == "__main__":
    main()
