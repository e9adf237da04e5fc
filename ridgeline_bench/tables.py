"""Results as tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from ridgeline_bench.diff import Row
from ridgeline_bench.kernels import Timing
from ridgeline_bench.ladders.runs import COPY, RungTime
from ridgeline_bench.results import Record

if TYPE_CHECKING:
    from ridgeline_bench.ladders.micro import MicroAnswer


def figures(records: Sequence[Record]) -> Table:
    """Return one engine's figures beside the limit."""
    table = Table("workload", "metric", "value", "limit", "of limit", title=_title(records))
    for r in records:
        table.add_row(r.workload, r.metric, number(r.value, r.unit), number(r.limit, r.unit), share(r.share))
    return table


def side_by_side(ours: Sequence[Record], theirs: Sequence[Record]) -> Table:
    """Return two engines on the same work. The last column is how many times better ours is."""
    names = [records[0].engine if records else "?" for records in (ours, theirs)]
    table = Table("workload", "metric", "limit", *names, f"{names[0]} better by", title=_title(ours))
    peers = {(r.workload, r.metric): r for r in theirs}
    for r in ours:
        peer = peers.pop((r.workload, r.metric), None)
        values = number(r.limit, r.unit), number(r.value, r.unit), number(peer.value, r.unit) if peer else ""
        table.add_row(r.workload, r.metric, *values, f"{advantage(r, peer):.2f}x" if peer else "")
    for r in peers.values():
        table.add_row(r.workload, r.metric, number(r.limit, r.unit), "", number(r.value, r.unit), "")
    return table


def advantage(ours: Record, theirs: Record) -> float:
    """Return the factor by which `ours` is better. Above 1 it wins."""
    better, worse = (theirs, ours) if ours.better == "lower" else (ours, theirs)
    return better.value / worse.value if worse.value else float("inf")


def kernels(timings: Sequence[Timing], records: Sequence[Record]) -> Table:
    """Return times, rates and shares of the limit; in place of a speed, what is wrong."""
    table = Table("op", "case", "implementation", "time", "GB/s", "GFLOP/s", "of limit")
    for timing, r in zip(timings, records, strict=True):
        names = timing.subject.op.name, timing.subject.case.label, timing.implementation
        if timing.error:
            table.add_row(*names, f"[red]{timing.error}[/red]", "", "", "")
            continue
        rates = (f"{r.options[what] / timing.seconds / 1e9:,.1f}" for what in ("bytes", "flops"))
        table.add_row(*names, number(r.value, r.unit), *rates, share(r.share))
    return table


def rungs(times: Sequence[RungTime]) -> Table:
    """Return a ladder's rungs: times beside the fastest library's (or a copy's) where they were measured, and the least
    times."""
    of = "of a copy" if any(each.bytes for each in times) else "of the best library"
    unit = " or ".join(dict.fromkeys("GB/s" if each.bytes else "TFLOP/s" for each in times))
    table = Table("problem", "rung", "time", unit, of, "least time", "limit")
    peers = {  # the fastest one of each problem is the last to be set
        each.problem: each.seconds
        for each in sorted(times, key=lambda each: -each.seconds)
        if each.peer and each.seconds and (not each.bytes or each.rung == COPY)
    }
    for each in times:
        measured = ("", "", "")
        if each.error:
            measured = (f"[red]{each.error}[/red]", "", "")
        elif each.seconds:
            rate = f"{(each.bytes / 1e9 or each.flops / 1e12) / each.seconds:,.1f}"
            measured = (number(1e6 * each.seconds, "µs"), rate, share(peers.get(each.problem, 0.0) / each.seconds))
        least = number(1e6 * each.least, "µs") if each.least else ""
        table.add_row(each.problem, each.rung, *measured, least, each.limiter)
    return table


def answers(found: Sequence[MicroAnswer]) -> Table:
    """Return micros' cases: what was predicted, what was measured, and the verdict."""
    table = Table("micro", "case", "predicted", "measured", "unit", "verdict")
    for each in found:
        measured = f"{each.value:.4g}" if each.samples else ""
        verdict = f"[red]{each.error}[/red]" if each.error else each.verdict
        table.add_row(each.micro.name, each.case.name, f"{each.case.predicted:g}", measured, each.case.unit, verdict)
    return table


def verdicts(rows: Sequence[Row]) -> Table:
    table = Table("engine", "workload", "metric", "A", "B", "B is")
    for row in rows:
        table.add_row(*row.what[:3], number(row.a, row.unit), number(row.b, row.unit), row.verdict)
    return table


def number(value: float, unit: str) -> str:
    """Return three significant digits or all before the point; empty for 0, which stands for unknown."""
    if not value:
        return ""
    return f"{value:,.0f} {unit}" if abs(value) >= 1000 else f"{value:.3g} {unit}"


def share(value: float) -> str:
    return f"{100 * value:.0f} %" if value else ""


def _title(records: Sequence[Record]) -> str:
    if not records:
        return ""
    r = records[0]
    scale = f", scale {r.options['scale']}" if "scale" in r.options else ""
    return f"{r.model}, {r.dtype}, {r.machine.gpu or r.machine.cpu}{scale}"
