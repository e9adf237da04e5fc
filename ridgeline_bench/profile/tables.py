"""The time of a profiled run by op, by kernel, and by what the host did while the device was idle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

from ridgeline.perf.bottleneck import Floors, bottleneck
from ridgeline.perf.explain import JOINT
from ridgeline.perf.hardware import FLOORS
from ridgeline_bench.profile.ranges import HOST, OP, SEGMENT
from ridgeline_bench.profile.trace import Event, Kind

Interval = tuple[float, float]  # start and end in µs of the trace's clock
WORK = {True: (Kind.KERNEL, Kind.COPY), False: (Kind.OPERATOR,)}  # what computes: on a GPU, and on a CPU


class OpLimit(NamedTuple):
    """The least seconds of an op's calls, and how many of these are those of the memory's roof."""

    seconds: float
    memory: float

    def plus(self, other: OpLimit) -> OpLimit:
        return OpLimit(self.seconds + other.seconds, self.memory + other.memory)

    @property
    def roof(self) -> str:
        return "memory" if 2 * self.memory >= self.seconds else "compute"


@dataclass(frozen=True)
class Row:
    """One row. `seconds` is over all `calls`. `limit` is the least they could have taken, or None if nothing honest can
    be said; then `bound` is empty, which else is a class of `perf.bottleneck`."""

    name: str
    seconds: float
    calls: int
    limit: float | None = None
    bound: str = ""


def kernel_rows(events: Iterable[Event], *, cuda: bool) -> list[Row]:
    """Return the kernels on a GPU, or torch's own operators on a CPU (without time in other operators), slowest
    first."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in events:
        if event.kind in WORK[cuda]:
            totals[event.name][0] += event.elapsed if cuda else event.own
            totals[event.name][1] += 1
    return _sorted(Row(name, micros / 1e6, int(calls)) for name, (micros, calls) in totals.items())


def op_rows(
    events: Iterable[Event], limits: Mapping[str, OpLimit], *, cuda: bool, floors: Floors = FLOORS
) -> list[Row]:
    """Return our ops by their names in the cost model. `limits` maps an op to the limit of all its calls in the run.

    On a GPU an op's time is from the start of its first kernel to the end of its last, taken from the range's shadow on
    the device. Torch counts only kernels of its own towards the host's ranges.
    """
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    side = Kind.DEVICE_RANGE if cuda else Kind.RANGE
    for event in events:
        if event.kind is side and event.name.startswith(OP):
            totals[event.name.removeprefix(OP)][0] += event.elapsed
            totals[event.name.removeprefix(OP)][1] += 1
    return _sorted(
        _judged(name, us / 1e6, int(calls), _limit(name, limits), floors, eager=not cuda)
        for name, (us, calls) in totals.items()
    )


def _judged(name: str, spent: float, calls: int, limit: OpLimit | None, floors: Floors, *, eager: bool) -> Row:
    if limit is None:
        return Row(name, spent, calls)
    found = bottleneck(limit.seconds / calls, limit.roof, floors, eager=eager, measured=spent / calls)
    return Row(name, spent, calls, limit.seconds, found)


def _limit(name: str, limits: Mapping[str, OpLimit]) -> OpLimit | None:
    """Return the op's limit, which for a fused op is that of its parts."""
    parts = [limits.get(part) for part in name.split(JOINT)]
    known = [part for part in parts if part is not None]
    return reduce(OpLimit.plus, known) if len(known) == len(parts) else None


def idle_rows(events: Iterable[Event], *, cuda: bool) -> tuple[float, list[Row]]:
    """Return (seconds from the device's first to its last work, what the host did in each pause of it, longest first).

    The device's work is its kernels and copies; on a CPU it is the two segments on the worker's thread.
    """
    listed = list(events)
    busy = merged(
        (event.start, event.end)
        for event in listed
        if (event.kind in WORK[True] if cuda else event.kind is Kind.RANGE and event.name.startswith(SEGMENT))
    )
    if not busy:
        return 0.0, []
    gaps = [(a_end, b_start) for (_, a_end), (b_start, _) in pairwise(busy)]
    host: dict[str, list[Interval]] = defaultdict(list)
    for event in listed:
        if event.kind is Kind.RANGE and event.name.startswith((HOST, SEGMENT)):
            host[event.name].append((event.start, event.end))
    waiting = _without(host.pop(HOST + "submit", []), host)
    shares = {name: overlap(gaps, merged(spans)) for name, spans in host.items()}
    shares[HOST + "submit, outside the segments"] = overlap(gaps, waiting)
    total = sum(end - start for start, end in gaps)
    shares["caller (text, streams) and the loop"] = total - sum(shares.values())
    rows = [Row(name, micros / 1e6, len(gaps)) for name, micros in shares.items() if micros > 0]
    return (busy[-1][1] - busy[0][0]) / 1e6, _sorted(rows)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union as disjoint intervals in order."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def overlap(first: list[Interval], second: list[Interval]) -> float:
    """Return the length that two lists of disjoint, ordered intervals have in common."""
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total


def _without(spans: list[Interval], others: Mapping[str, list[Interval]]) -> list[Interval]:
    """Return the parts of `spans` during which none of `others` runs."""
    taken = merged(span for name in others for span in others[name])
    left: list[Interval] = []
    for start, end in merged(spans):
        for a, b in (span for span in taken if span[0] < end and span[1] > start):
            if a > start:
                left.append((start, a))
            start = max(start, b)
        if start < end:
            left.append((start, end))
    return left


def _sorted(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -row.seconds)
