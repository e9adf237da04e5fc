"""Traces of several processes by torch's profiler on one time axis: bubbles and stragglers by name.

    python -m ridgeline_bench.profile.ranks TRACE ... [--out merged.json] [--align]

A trace is a file that torch's profiler exported, of one process: a rank, or the host that drives ranks
(`torch-host.json` or `host.json`). Files are named after their rank: `torch-rank3.json`, or any other name. If two
files have one name, their folders are named too. The merged file is one
Chrome trace: Perfetto and chrome://tracing show the processes below each other.

* **One time axis.** Kineto writes the time at which a trace's clock is 0 (`baseTimeNanoseconds`), by the host's clock.
  Processes of one host share that. `--align` is for several hosts: it shifts each rank so that the ends of the
  collectives agree with the first rank's, in the median.
* **Bubbles** are pauses of a rank between pieces of its work: kernels and copies of a GPU, segments of a step on a CPU.
  Beside each stands what the host did meanwhile, by its ranges.
* **Stragglers.** The n-th collective of a name is the same one on all ranks. A rank that came early waits until the
  last one comes: it is that rank's doing.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ridgeline.core.errors import InvalidConfig
from ridgeline.engine.engine import Engine
from ridgeline.parallel.stamps import KINDS as NOTED
from ridgeline.parallel.stamps import SEGMENT, TOGETHER
from ridgeline.ranks.leader import Group
from ridgeline_bench.engines import profiler
from ridgeline_bench.profile.ranges import HOST, host_ranges
from ridgeline_bench.profile.tables import WORK, Interval, merged, overlap
from ridgeline_bench.profile.trace import Event, Kind, document, events_of, on_device

HOST_FILE = "host"
COLLECTIVE = re.compile(r"nccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|exchange", re.IGNORECASE)
SHORTEST = 10.0  # µs; shorter pauses lie between kernels that were launched together
NO_HOST = "nothing that has a name"


@dataclass
class Process:
    """A process's trace, moved to the common axis: µs since the first trace began.

    name: as tables show it. written: the file's content. shift: µs that its own times are behind.
    """

    name: str
    written: Mapping[str, Any]
    events: Sequence[Event]
    shift: float = 0.0
    busy: list[Interval] = field(default_factory=list)

    @property
    def is_host(self) -> bool:
        return self.name.rpartition("/")[2] == HOST_FILE

    def collectives(self) -> dict[str, list[Interval]]:
        """Return when the process was in each collective, by name, in order: of a GPU its kernels, else ranges."""
        found: dict[str, list[Interval]] = defaultdict(list)
        device = on_device(self.events)
        for event in self.events:
            of_device = event.kind is Kind.KERNEL and COLLECTIVE.search(event.name)
            if of_device if device else event.kind is Kind.RANGE and event.name in TOGETHER:
                found[event.name].append((event.start, event.end))
        return found


@dataclass(frozen=True)
class Bubble:
    """A pause of a rank: µs of the common axis, and what the host did for the longest part of it."""

    rank: str
    start: float
    end: float
    host: str

    @property
    def micros(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Straggler:
    """A rank: µs that it waited for others in collectives, that others waited for it, and how often it was the last.
    longest: the µs, the collective and the time of the longest wait for it."""

    rank: str
    waited: float
    caused: float
    last: int
    longest: tuple[float, str, float]


def traced(engine: Engine, group: Group, workload: Callable[[], object], out: Path) -> str:
    """Trace a workload in the engine's process and in all ranks, write `merged.json` to `out`, and return the report.
    Ranks write their own traces to `rank_trace_dir`."""
    group.begin_trace()
    with host_ranges(engine, group, cuda=False), profiler(cuda=False) as seen:
        workload()
    files = group.end_trace()
    host = out / f"torch-{HOST_FILE}.json"
    seen.export_chrome_trace(str(host))
    processes = read([host, *files])
    (out / "merged.json").write_text(json.dumps(merge(processes)))
    return report(processes)


def read(files: Sequence[Path], *, align: bool = False) -> list[Process]:
    """Return the traces of some files on one time axis. align: by the ends of collectives too.

    Raise InvalidConfig for a file that is no trace, for one that does not say when its clock began, and for one that is
    given twice.
    """
    found, begins = [], []
    if twice := [str(file) for file, times in Counter(file.resolve() for file in files).items() if times > 1]:
        raise InvalidConfig(f"{twice[0]!r} is given twice; give each trace once.")
    several = Counter(_name(file) for file in files)
    for file in files:
        written = document(file)
        try:
            begins.append(float(written["baseTimeNanoseconds"]) / 1e3)
        except (KeyError, TypeError, ValueError):
            raise InvalidConfig(
                f"{str(file)!r} does not say when its clock began; torch's profiler since 2.4 does."
            ) from None
        name = _name(file)
        found.append(
            Process(name if several[name] == 1 else f"{file.resolve().parent}/{name}", written, events_of(written))
        )
    for process, begin in zip(found, begins, strict=True):
        _move(process, begin - min(begins))
    ranks = [process for process in found if not process.is_host]
    if align and ranks:
        for process in ranks[1:]:
            _move(process, _apart(ranks[0], process))
    first = min((event.start for process in found for event in process.events), default=0.0)
    for process in found:
        _move(process, -first)
        process.busy = _busy(process)
    return found


def _name(file: Path) -> str:
    name = re.sub(r"^torch-|\.(json|gz)\b", "", file.name)
    return re.sub(r"rank(\d)", r"rank \1", name)


def _move(process: Process, micros: float) -> None:
    process.shift += micros
    for event in process.events:
        event.start += micros
        event.end += micros


def _apart(first: Process, other: Process) -> float:
    """Return the µs by which another process's clock is behind the first one's, by the ends of collectives."""
    theirs = other.collectives()
    ends = [
        a[1] - b[1]
        for name, each in first.collectives().items()
        if len(theirs.get(name, ())) == len(each)
        for a, b in zip(each, theirs[name], strict=True)
    ]
    return statistics.median(ends) if ends else 0.0


def _busy(process: Process) -> list[Interval]:
    if on_device(process.events):
        return merged((each.start, each.end) for each in process.events if each.kind in WORK[True])
    segment = NOTED[SEGMENT]
    return merged((e.start, e.end) for e in process.events if e.kind is Kind.RANGE and e.name == segment)


def bubbles(processes: Sequence[Process]) -> list[Bubble]:
    """Return the ranks' pauses, the longest first."""
    ranges: dict[str, list[Interval]] = defaultdict(list)
    for process in processes:
        for event in process.events if process.is_host else ():
            if event.kind is Kind.RANGE and event.name.startswith(HOST):
                ranges[event.name].append((event.start, event.end))
    union = {name: merged(spans) for name, spans in ranges.items()}
    found = []
    for process in processes:
        for (_, start), (end, _) in pairwise([] if process.is_host else process.busy):
            if end - start >= SHORTEST:
                shares = {name: overlap([(start, end)], _near(spans, start, end)) for name, spans in union.items()}
                most = max(shares, key=shares.__getitem__, default="")
                found.append(Bubble(process.name, start, end, most if shares.get(most) else NO_HOST))
    return sorted(found, key=lambda bubble: -bubble.micros)


def _near(spans: list[Interval], start: float, end: float) -> list[Interval]:
    """Return those of disjoint, ordered intervals that reach into one."""
    first = bisect_right(spans, start, key=lambda span: span[1])
    return spans[first : bisect_left(spans, end, lo=first, key=lambda span: span[0])]


def stragglers(processes: Sequence[Process]) -> list[Straggler]:
    """Return the ranks by what others waited for them, the worst first. Collectives of which ranks have different
    numbers are left out: it cannot be said which is which."""
    ranks = [process for process in processes if not process.is_host]
    each = [process.collectives() for process in ranks]
    waited, caused, last = [0.0] * len(ranks), [0.0] * len(ranks), [0] * len(ranks)
    longest = [(0.0, "", 0.0)] * len(ranks)
    common = [name for name in (each[0] if each else ()) if len({len(own.get(name, ())) for own in each}) == 1]
    for name in common:
        for number, spans in enumerate(zip(*(own[name] for own in each), strict=True)):
            latest = max(range(len(ranks)), key=lambda rank, spans=spans: spans[rank][0])  # type: ignore[misc]
            waits = [spans[latest][0] - start for start, _ in spans]
            last[latest] += 1
            for rank, wait in enumerate(waits):
                waited[rank] += wait
                caused[latest] += wait
            longest[latest] = max(longest[latest], (max(waits), f"{name} {number}", spans[latest][0]))
    found = [
        Straggler(process.name, waited[rank], caused[rank], last[rank], longest[rank])
        for rank, process in enumerate(ranks)
    ]
    return sorted(found, key=lambda straggler: -straggler.caused)


def merge(processes: Sequence[Process]) -> dict[str, Any]:
    """Return one Chrome trace of all processes. Raise InvalidConfig for an event that is none."""
    events: list[dict[str, Any]] = []
    numbers: dict[tuple[str, Any], int] = {}
    for place, process in enumerate(processes):
        try:
            events += (_moved(event, place, process, numbers) for event in process.written["traceEvents"])
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidConfig(f"the trace of {process.name} has an event that is none ({error}).") from error
    sort = [
        {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
        for number in numbers.values()
    ]
    return {"traceEvents": [*sort, *events], "displayTimeUnit": "ms"}


def _moved(
    event: Mapping[str, Any], place: int, process: Process, numbers: dict[tuple[str, Any], int]
) -> dict[str, Any]:
    """Return an event on the common axis. place: of its process. numbers: of processes of the merged trace."""
    number = numbers.setdefault((process.name, event.get("pid")), len(numbers) + 1)
    moved = {**event, "pid": number}
    if "ts" in event:
        moved["ts"] = float(event["ts"]) + process.shift
    if "id" in event:  # arrows of two processes are not the same ones
        moved["id"] = f"{place}.{event['id']}"
    if event.get("ph") == "M" and event.get("name") == "process_name":
        moved["args"] = {"name": f"{process.name}: {event.get('args', {}).get('name', '')}"}
    return moved


def report(processes: Sequence[Process], most: int = 8) -> str:
    """Return tables of the ranks, their longest bubbles and the stragglers."""
    found, lines = bubbles(processes), [f"{'rank':<12} {'span ms':>10} {'busy':>7} {'bubbles':>8} {'ms in them':>11}"]
    for process in processes:
        if process.busy and not process.is_host:
            span = process.busy[-1][1] - process.busy[0][0]
            own = [bubble.micros for bubble in found if bubble.rank == process.name]
            busy = sum(end - start for start, end in process.busy) / max(span, 1e-9)
            lines.append(f"{process.name:<12} {span / 1e3:10.2f} {busy:7.1%} {len(own):8} {sum(own) / 1e3:11.2f}")
    lines += ["", f"{'longest bubbles':<12} {'at ms':>8} {'ms':>8}  the host then"]
    lines += [f"  {b.rank:<13} {b.start / 1e3:8.2f} {b.micros / 1e3:8.3f}  {b.host}" for b in found[:most]]
    late = stragglers(processes)
    lines += ["", f"{'rank':<12} {'waited ms':>10} {'waited for ms':>14} {'last':>6}  longest wait for it"]
    for each in late:
        micros, name, when = each.longest
        where = f"{micros / 1e3:.3f} ms at {when / 1e3:.2f}, {name}" if each.last else ""
        lines.append(f"{each.rank:<12} {each.waited / 1e3:10.2f} {each.caused / 1e3:14.2f} {each.last:6}  {where}")
    if len(late) > 1 and late[0].caused:
        lines.append(f"the straggler is {late[0].rank}: the others waited {late[0].caused / 1e3:.2f} ms for it")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--align", action="store_true")
    given = parser.parse_args()
    try:
        processes = read(given.traces, align=given.align)
        if given.out:
            given.out.write_text(json.dumps(merge(processes)))
    except (InvalidConfig, OSError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    print(report(processes), end="")


if __name__ == "__main__":
    main()
