"""Decode steps of several engines beside each other, from traces of the same requests.

An engine runs requests of one length twice: to their first tokens, and to their last. What the second trace has more
than the first one is that of the decode steps, so nothing of an engine has to be marked or understood.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.profile.profile import table_of
from ridgeline_bench.profile.tables import WORK, Row, kernel_rows, merged
from ridgeline_bench.profile.trace import Event, Kind, on_device, read_trace
from ridgeline_bench.workloads import PROCESSOR

SHORT = 10.0  # µs; pauses between a graph's kernels are shorter, those in which the device waits for the host longer
LAUNCHES, GRAPHS, WAITS = "kernel launches", "graph launches", "waits"


@dataclass(frozen=True)
class Totals:
    """The sums of one trace. Times are seconds: from the first work to the last, with work, and in pauses up to `SHORT`
    and beyond."""

    span: float = 0.0
    busy: float = 0.0
    short: float = 0.0
    long: float = 0.0
    long_pauses: int = 0
    kernels: int = 0
    copies: int = 0
    calls: Mapping[str, int] | None = None


@dataclass(frozen=True, kw_only=True)
class DecodeSteps:
    """The decode steps of one engine. `step` and `prompts` are seconds without a profiler, of one step and to the first
    tokens. `limit` is the least seconds of a step, and `processor` the seconds that cores gave to the engine's process
    (0: unknown). `totals` and `rows` are of all `steps`, with a profiler. On a CPU work is torch's operators."""

    engine: str
    version: str
    steps: int
    step: float
    prompts: float
    cuda: bool
    totals: Totals
    rows: Sequence[Row]
    limit: float = 0.0
    processor: float = 0.0

    @property
    def idle(self) -> float:
        """The share of the decode steps in which the device did nothing."""
        return 1 - self.totals.busy / self.totals.span if self.totals.span else 0.0


def totals(events: Sequence[Event], *, cuda: bool) -> Totals:
    """Return the sums of one trace."""
    kinds = Counter(event.kind for event in events)
    busy = merged((event.start, event.end) for event in events if event.kind in WORK[cuda])
    if not busy:
        return Totals()
    pauses = [start - end for (_, end), (start, _) in pairwise(busy)]
    return Totals(
        span=(busy[-1][1] - busy[0][0]) / 1e6,
        busy=sum(end - start for start, end in busy) / 1e6,
        short=sum(pause for pause in pauses if pause <= SHORT) / 1e6,
        long=sum(pause for pause in pauses if pause > SHORT) / 1e6,
        long_pauses=sum(pause > SHORT for pause in pauses),
        kernels=kinds[Kind.KERNEL] if cuda else kinds[Kind.OPERATOR],
        copies=kinds[Kind.COPY],
        calls=_calls(events),
    )


def decode_steps(
    folder: Path, figures: Mapping[str, tuple[float, float]], *, engine: str, version: str, steps: int
) -> DecodeSteps:
    """Return the figures of `steps` decode steps, by the traces of both runs: `prompts-*.json` and `whole-*.json`, or
    compressed ones. Of traces of one run the shortest counts, since what disturbs only adds.

    figures: by the names of both runs, their seconds without a profiler and the least that they could have taken.

    Raise InvalidConfig for traces without work.
    """

    def of_a_step(end: str, place: int) -> float:
        whole, prompts = (figures.get(name + end, (0.0, 0.0))[place] for name in ("whole", "prompts"))
        return (whole - prompts) / steps

    first, last = _shortest(folder, "prompts"), _shortest(folder, "whole")
    cuda = on_device(last)
    both = totals(first, cuda=cuda), totals(last, cuda=cuda)
    if not both[1].busy:
        raise InvalidConfig(
            f"the trace of {engine} has no kernel of a GPU and no operator of torch: on a CPU an engine must compute "
            "with torch, and on GPUs in the process that is traced."
        )
    return DecodeSteps(
        engine=engine,
        version=version,
        steps=steps,
        step=of_a_step("", 0),
        prompts=figures["prompts"][0],
        cuda=cuda,
        totals=_more(*both),
        rows=rows_more(kernel_rows(first, cuda=cuda), kernel_rows(last, cuda=cuda)),
        limit=of_a_step("", 1),
        processor=of_a_step(PROCESSOR, 0),
    )


def _shortest(folder: Path, name: str) -> list[Event]:
    traces = [read_trace(path) for path in sorted(folder.glob(f"{name}-*.json*"))]
    return min(traces, key=lambda events: totals(events, cuda=on_device(events)).span, default=[])


def rows_more(first: Iterable[Row], last: Iterable[Row]) -> list[Row]:
    """Return the rows of `last` less those of `first`, slowest first, without names that were not called more often."""
    before = {row.name: row for row in first}
    none = Row("", 0.0, 0)
    more = [
        Row(row.name, max(0.0, row.seconds - before.get(row.name, none).seconds), row.calls - known.calls)
        for row in last
        if row.calls > (known := before.get(row.name, none)).calls
    ]
    return sorted(more, key=lambda row: -row.seconds)


def _more(first: Totals, last: Totals) -> Totals:
    calls = {name: count - (first.calls or {}).get(name, 0) for name, count in (last.calls or {}).items()}
    return Totals(
        span=last.span - first.span,
        busy=last.busy - first.busy,
        short=last.short - first.short,
        long=last.long - first.long,
        long_pauses=last.long_pauses - first.long_pauses,
        kernels=last.kernels - first.kernels,
        copies=last.copies - first.copies,
        calls=calls,
    )


def _calls(events: Iterable[Event]) -> dict[str, int]:
    """Return the number of the host's launches of kernels and of graphs, and of its waits for the device."""
    named = {LAUNCHES: 0, GRAPHS: 0, WAITS: 0}
    for event in events:
        if event.kind is Kind.CALL:
            named[LAUNCHES] += "LaunchKernel" in event.name
            named[GRAPHS] += "GraphLaunch" in event.name
            named[WAITS] += event.name.endswith("Synchronize")
    return named


def table(sides: Sequence[DecodeSteps], title: str, most: int = 12) -> str:
    """Return one page: a decode step of all engines in columns, then the kernels of each."""
    cuda = any(side.cuda for side in sides)
    lines = [f"{title}; a decode step", " " * 44 + "".join(f"{f'{s.engine} {s.version}':>24}" for s in sides)]
    lines += [f"{name:<44}" + "".join(f"{of(side):>24}" for side in sides) for name, of in _figures(sides)]
    if not cuda:
        lines += ["On a CPU, busy is the time in torch's operators. Idle is all other: Python, and threads that wait."]
    for side in sides:
        name = "kernels" if side.cuda else "operators"
        lines += table_of(f"{side.engine}: {name} of all {side.steps} decode steps", list(side.rows), most)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _ms(of: Callable[[DecodeSteps], float]) -> Callable[[DecodeSteps], str]:
    return lambda side: f"{1e3 * of(side):.3f}"


def _figures(sides: Sequence[DecodeSteps]) -> list[tuple[str, Callable[[DecodeSteps], str]]]:
    def per_step(
        value: Callable[[Totals], float], digits: int = 1, factor: float = 1.0
    ) -> Callable[[DecodeSteps], str]:
        return lambda side: f"{factor * value(side.totals) / side.steps:.{digits}f}"

    def called(name: str) -> Callable[[DecodeSteps], str]:
        return per_step(lambda totals: (totals.calls or {}).get(name, 0))

    cuda = any(side.cuda for side in sides)
    if_known: list[tuple[str, Callable[[DecodeSteps], float]]] = [
        ("  the hardware's limit, ms", lambda side: side.limit),
        ("  processor time, ms", lambda side: side.processor),
    ]
    known = [(name, _ms(of)) for name, of in if_known if any(map(of, sides))]
    of_gpus: list[tuple[str, Callable[[DecodeSteps], str]]] = [
        ("copies and fills", per_step(lambda totals: totals.copies)),
        *((name + " of the host", called(name)) for name in (LAUNCHES, GRAPHS, WAITS)),
    ]
    return [
        ("ms", _ms(lambda side: side.step)),
        *known,
        ("ms, with the profiler", per_step(lambda totals: totals.span, 3, 1e3)),
        ("  busy, ms", per_step(lambda totals: totals.busy, 3, 1e3)),
        ("  idle", lambda side: f"{100 * side.idle:.1f} %"),
        (f"  idle in pauses of up to {SHORT:g} µs, ms", per_step(lambda totals: totals.short, 3, 1e3)),
        ("  idle in longer pauses, ms", per_step(lambda totals: totals.long, 3, 1e3)),
        ("  longer pauses", per_step(lambda totals: totals.long_pauses)),
        ("kernels" if cuda else "operators", per_step(lambda totals: totals.kernels)),
        *(of_gpus if cuda else []),
        ("first tokens of all prompts, ms", lambda side: f"{1e3 * side.prompts:.1f}"),
    ]


def line(side: DecodeSteps, most: int = 12) -> dict[str, Any]:
    """Return the line of an engine in a result file; times are ms of a step."""

    def of_a_step(seconds: float) -> float:
        return 1e3 * seconds / side.steps

    found = side.totals
    return {
        "kind": "decode steps", "engine": side.engine, "version": side.version, "steps": side.steps,
        "step_ms": 1e3 * side.step, "limit_ms": 1e3 * side.limit,
        "processor_ms": 1e3 * side.processor, "prompts_ms": 1e3 * side.prompts, "cuda": side.cuda,
        "traced_ms": of_a_step(found.span), "busy_ms": of_a_step(found.busy), "idle_share": side.idle,
        "short_pauses_ms": of_a_step(found.short), "long_pauses_ms": of_a_step(found.long),
        "long_pauses": found.long_pauses / side.steps, "kernels": found.kernels / side.steps,
        "copies": found.copies / side.steps,
        "calls": {name: count / side.steps for name, count in (found.calls or {}).items()},
        "top": [[row.name, of_a_step(row.seconds), row.calls / side.steps] for row in side.rows[:most]],
    }  # fmt: skip
