"""Reads the events that torch records of a GPU's allocator: bytes in use and held over time, what made the peak, and
how free memory lay between blocks.

The caching allocator takes segments from the driver and cuts them into blocks. *Allocated* bytes are those of blocks in
use, *reserved* ones those of all segments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

POINTS = 300  # of a curve, beside its peaks
TAKES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}  # from the driver, and back
USES = {"alloc": 1, "free_completed": -1}

Frames = Sequence[Mapping[str, Any]]


class Moment(NamedTuple):
    """A moment of a curve: microseconds since its first event, and bytes."""

    us: int
    allocated: int
    reserved: int


class Timeline(NamedTuple):
    """A stretch of an allocator's events.

    moments: a curve of both sizes, thinned out. peak: the moment with most bytes in use. at_peak: bytes in use then by
    the line that took them, those from before the first event as "before". calls: how often each kind of event was
    there. churn: bytes of all blocks that were taken.
    """

    moments: Sequence[Moment]
    peak: Moment
    at_peak: Mapping[str, int]
    calls: Mapping[str, int]
    churn: int


class Fragments(NamedTuple):
    """The use of segments, in bytes.

    unused: in free blocks of segments that are in use, which no other process and no other stream can have. cached: in
    segments without a block in use, which the allocator would give back. graphs: in such segments of private pools,
    which captured graphs may write to as long as they live. largest: the largest free block. padding: of blocks beyond
    what was asked for.
    """

    segments: int
    allocated: int
    reserved: int
    unused: int
    cached: int
    graphs: int
    largest: int
    padding: int

    @property
    def fragmentation(self) -> float:
        """The share of what is reserved that lies in free blocks of segments in use."""
        return self.unused / self.reserved if self.reserved else 0.0


def maker(frames: Frames) -> str:
    """Return the innermost Python line of an allocation that is not torch's own."""
    for frame in frames:
        if frame["filename"].endswith(".py") and "/torch/" not in frame["filename"]:
            return f"{frame['filename'].rsplit('/', 1)[-1]}:{frame['line']} {frame['name']}"
    return ""


def timeline(trace: Iterable[Mapping[str, Any]], allocated: int = 0, reserved: int = 0) -> Timeline:
    """Return the course of a device's memory by its trace (an entry of torch's "device_traces"). allocated, reserved:
    bytes in front of its first event."""
    live: dict[int, tuple[int, str]] = {}
    before, began, churn = allocated, None, 0
    calls, moments = Counter[str](), [Moment(0, allocated, reserved)]
    peak, at_peak = moments[0], dict[int, tuple[int, str]]()
    for event in trace:
        what, size, us = event["action"], event["size"], int(event["time_us"])
        began = us if began is None else began
        calls[what] += 1
        if what in USES:
            allocated += USES[what] * size
            if what == "alloc":
                churn += size
                live[event["addr"]] = size, maker(event.get("frames", ()))
            elif event["addr"] in live:
                del live[event["addr"]]
            else:
                before -= size
        elif what in TAKES:
            reserved += TAKES[what] * size
        else:
            continue
        moments.append(Moment(us - began, allocated, reserved))
        if allocated > peak.allocated:
            peak, at_peak = moments[-1], {**live, 0: (before, "before")}
    made = Counter[str]()
    for size, by in at_peak.values():
        made[by] += size
    return Timeline(thinned(moments), peak, dict(made.most_common()), dict(calls), churn)


def thinned(moments: Sequence[Moment], points: int = POINTS) -> list[Moment]:
    """Return about so many moments, those with most and least bytes in use of each stretch among them."""
    if len(moments) <= 2 * points:
        return list(moments)
    kept = {0, len(moments) - 1}
    step = len(moments) / points
    for n in range(points):
        stretch = range(int(n * step), int((n + 1) * step))
        kept |= {max(stretch, key=lambda at: moments[at].allocated), min(stretch, key=lambda at: moments[at].allocated)}
        kept.add(max(stretch, key=lambda at: moments[at].reserved))
    return [moments[at] for at in sorted(kept)]


def fragments(segments: Iterable[Mapping[str, Any]]) -> Fragments:
    """Return the use of a snapshot's segments."""
    found = [*segments]
    free = [
        (block["size"], "unused" if segment["allocated_size"] else _pool(segment))
        for segment in found
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    return Fragments(
        segments=len(found),
        allocated=sum(each["allocated_size"] for each in found),
        reserved=sum(each["total_size"] for each in found),
        **{where: sum(size for size, found in free if found == where) for where in ("unused", "cached", "graphs")},
        largest=max((size for size, _ in free), default=0),
        padding=sum(
            block["size"] - block.get("requested_size", block["size"])
            for each in found
            for block in each["blocks"]
            if block["state"] == "active_allocated"
        ),
    )


def _pool(segment: Mapping[str, Any]) -> str:
    """Return "cached" for a segment of the pool that all share, "graphs" for one of a private pool."""
    return "cached" if tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0) else "graphs"
