"""Profiles of one workload, run three times on a warm engine: as it is, under the stack sampler, under torch's
profiler.

The first run gives the time. Profilers slow the host down, so only shares are read from them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.core.specs.model import ModelSpec
from ridgeline.engine.engine import Engine
from ridgeline.kernels.base.cost import Headroom, StepShape
from ridgeline.perf.bottleneck import Floors
from ridgeline.perf.hardware import FLOORS, Hardware
from ridgeline.perf.precision import Precision, precision
from ridgeline.perf.roofline import EXPERTS, bound, op_rate, seconds, step_ops
from ridgeline.worker.local import LocalWorker
from ridgeline_bench.engines import profiler
from ridgeline_bench.profile.flame import Sampler, collapsed, of_trace, svg
from ridgeline_bench.profile.memory import remembering, write_snapshot
from ridgeline_bench.profile.ranges import named_ranges
from ridgeline_bench.profile.tables import OpLimit, Row, idle_rows, kernel_rows, op_rows
from ridgeline_bench.profile.trace import read_trace

NOTHING = OpLimit(0.0, 0.0)
OpLimits = Callable[[StepShape], Mapping[str, OpLimit]]  # a step's shape → the limit of all calls of each op


@dataclass(frozen=True, kw_only=True)
class Report:
    """The profile of a run. `wall` is the seconds of the undisturbed run, and `span` the seconds from the device's
    first to its last work when profiled."""

    wall: float
    headroom: Headroom
    steps: int
    span: float
    ops: list[Row]
    kernels: list[Row]
    idle: list[Row]
    memory: Mapping[str, Any]
    floors: Floors = FLOORS


def profile(
    engine: Engine,
    worker: LocalWorker,
    workload: Callable[[], object],
    out: Path,
    limits: OpLimits | None = None,
    floors: Floors = FLOORS,
) -> Report:
    """Profile `workload` (which steps `engine` until it is done) and write trace, flame graph and memory to `out`."""
    device = worker.runner.device
    cuda = device.type == "cuda"
    out.mkdir(parents=True, exist_ok=True)
    workload()  # warm-up: first calls allocate, load and compile
    before, started = engine.headroom, time.perf_counter()
    workload()
    wall, headroom = time.perf_counter() - started, engine.headroom.since(before)
    with Sampler() as sampler:
        workload()
    (out / "stacks.txt").write_text(collapsed(sampler.stacks))
    (out / "flame.svg").write_text(svg(sampler.stacks, "ridgeline profile: Python stacks of all threads"))
    with remembering(device), named_ranges(engine, worker) as shapes, profiler(cuda=cuda) as traced:
        workload()
        memory = write_snapshot(out / "memory.json", device)
    traced.export_chrome_trace(str(out / "trace.json"))
    events = read_trace(out / "trace.json")
    (out / "steps.svg").write_text(
        svg(of_trace(events), "ridgeline profile: host and device, by ranges and calls", "µs")
    )
    span, idle = idle_rows(events, cuda=cuda)
    return Report(
        wall=wall,
        headroom=headroom,
        steps=len(shapes),
        span=span,
        ops=op_rows(events, _run_limits(shapes, limits), cuda=cuda, floors=floors),
        kernels=kernel_rows(events, cuda=cuda),
        idle=idle,
        memory=memory,
        floors=floors,
    )


def op_limits(model: ModelSpec, hardware: Hardware, dtype: str | Precision) -> OpLimits:
    """Return each op's limit in a step, by the roofline."""
    wide = precision(dtype)

    def limits(shape: StepShape) -> dict[str, OpLimit]:
        totals: dict[str, OpLimit] = {}
        for op in step_ops(model, shape, dtype=dtype):
            rate = op_rate(op.name, hardware, wide)
            least = op.count * seconds(op.cost, hardware, rate)
            of_memory = least if bound(op.cost, hardware, rate) == "memory" else 0.0
            totals[op.name] = totals.get(op.name, NOTHING).plus(OpLimit(least, of_memory))
        return totals

    return limits


def _run_limits(shapes: Sequence[StepShape], limits: OpLimits | None) -> dict[str, OpLimit]:
    """Return the limit of each op over all steps of a run."""
    totals: dict[str, OpLimit] = {}
    for shape in shapes if limits is not None else ():
        assert limits is not None
        for name, least in limits(shape).items():
            totals[name] = totals.get(name, NOTHING).plus(least)
    return totals


def summary(report: Report, title: str) -> str:
    """Return the report on one page."""
    share = report.headroom.share
    busy = sum(row.seconds for row in report.idle)
    lines = [
        title,
        f"{report.wall:.3f} s for {report.steps} steps, of which the device's steps {report.headroom.elapsed:.3f} s"
        + (f": {100 * share:.0f} % of the hardware limit" if share is not None else "; the hardware limit is unknown"),
        *table_of("ops (by name in the cost model)", report.ops, 24),
        *_mixture(report.ops),
        _launches(report.ops, report.floors.launch),
        *table_of("kernels", report.kernels, 16),
        *table_of(f"device idle {100 * busy / max(report.span, 1e-9):.0f} % of {report.span:.3f} s", report.idle, 8),
        "",
        "memory, largest tensors",
        *(f"  {t['bytes'] / 1e6:10.1f} MB  {t['count']:4} x {t['dtype']} {t['shape']}" for t in _largest(report)),
    ]
    return "\n".join(lines) + "\n"


def _launches(rows: list[Row], launch: float) -> str:
    """Return a line on the calls that a host cannot start as fast as a device ends them."""
    calls, short = sum(row.calls for row in rows), sum(row.calls for row in rows if row.seconds < row.calls * launch)
    least = f"a launch ({1e6 * launch:.1f} µs)"
    return f"  launch-bound without CUDA graphs: {short} of {calls} calls, which take less than {least}"


def _mixture(rows: list[Row]) -> list[str]:
    """Return a line about a mixture of experts, or nothing for other models."""
    spent = {row.name: row.seconds for row in rows}
    if "route" not in spent:
        return []
    total = sum(spent.values())
    products = sum(spent.get(name, 0.0) for name in EXPERTS)
    return [
        f"  routing and permutation (route) {100 * spent['route'] / total:.1f} %, experts' products "
        f"{100 * products / total:.1f} %"
    ]


def table_of(title: str, rows: list[Row], most: int) -> list[str]:
    """Return a table of the first `most` rows under an empty line and a title."""
    total = sum(row.seconds for row in rows)
    limits = f" {'of limit':>9}  bound by" if any(row.limit for row in rows) else ""
    lines = ["", f"{title:<52} {'ms':>10} {'calls':>7} {'share':>7}{limits}"]
    for row in rows[:most]:
        near = f"{100 * row.limit / row.seconds:7.0f} %" if row.limit and row.seconds else ""
        share = 100 * row.seconds / max(total, 1e-12)
        line = f"  {row.name[:50]:<50} {1e3 * row.seconds:10.3f} {row.calls:7} {share:5.1f} % {near:>9}  {row.bound}"
        lines.append(line.rstrip())
    if len(rows) > most:
        lines.append(f"  and {len(rows) - most} more, {1e3 * sum(row.seconds for row in rows[most:]):.3f} ms")
    return lines


def _largest(report: Report) -> list[dict[str, Any]]:
    return list(report.memory["tensors"][:8])
