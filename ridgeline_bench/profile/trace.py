"""Traces in Chrome's format, as torch's profiler writes them in any process, ours or a peer's."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ridgeline.core.errors import InvalidConfig

MOST_BYTES = 1 << 30  # of a trace; some thousand steps of a GPU
GZIP = b"\x1f\x8b"
NO_JSON = re.compile(r":\s*-?(?:inf|nan)\b")


class Kind(Enum):
    """The kind of an event. Kernels, copies and device ranges are the device's, all others the host's."""

    OPERATOR = "operator"  # of torch
    RANGE = "range"  # `record_function`
    CALL = "call"  # of the CUDA runtime or driver: a launch, a copy, a wait
    KERNEL = "kernel"
    COPY = "copy"  # and fills
    DEVICE_RANGE = "device range"  # from a range's first kernel to its last


KINDS = {  # by the category that Kineto, the library under torch's profiler, writes
    "cpu_op": Kind.OPERATOR,
    "user_annotation": Kind.RANGE,
    "cuda_runtime": Kind.CALL,
    "cuda_driver": Kind.CALL,
    "kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.COPY,
    "gpu_memset": Kind.COPY,
    "gpu_user_annotation": Kind.DEVICE_RANGE,
}
NESTED = (Kind.OPERATOR, Kind.RANGE, Kind.CALL)


@dataclass(slots=True)
class Event:
    """One event. Times are µs of the trace's clock; `own` is the time without that of events inside it on the same
    thread."""

    name: str
    kind: Kind
    start: float
    end: float
    thread: tuple[Any, Any] = (0, 0)
    own: float = 0.0

    @property
    def elapsed(self) -> float:
        return self.end - self.start


def read_trace(path: Path) -> list[Event]:
    """Return a trace's events in the order of their starts; the file may be compressed by gzip.

    Raise InvalidConfig if the file is no trace.
    """
    return events_of(document(path))


def document(path: Path) -> dict[str, Any]:
    """Return the content of a trace's file, with its events as they are written under "traceEvents".

    Raise InvalidConfig if the file is no trace.
    """
    try:
        written = _parsed(_text(path))
        found = {"traceEvents": written} if isinstance(written, list) else dict(written)
        events_of(found)
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidConfig(
            f"{str(path)!r} is no trace in Chrome's format ({error}); torch's profiler writes one."
        ) from error
    return found


def events_of(written: Mapping[str, Any]) -> list[Event]:
    """Return the events of a trace's content, in the order of their starts."""
    listed = written["traceEvents"]
    events = [_event(each) for each in listed if each.get("ph") == "X" and each.get("cat") in KINDS]
    events.sort(key=lambda event: (event.start, -event.end))
    _nest(events)
    return events


def _text(path: Path) -> str:
    """Return a trace's text. Raise ValueError for one that would not fit into memory with what is made of it."""
    with path.open("rb") as file:
        packed = file.read(len(GZIP)) == GZIP
    with gzip.open(path) if packed else path.open("rb") as file:
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB; profile fewer steps")
    return raw.decode(errors="replace")


def on_device(events: Iterable[Event]) -> bool:
    """Return True if a trace has work of a GPU."""
    return any(event.kind in (Kind.KERNEL, Kind.COPY) for event in events)


def _parsed(text: str) -> Any:
    """Return the JSON of a text. Kineto writes `inf` for the bandwidth of a copy that took no time, which is none."""
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return json.loads(NO_JSON.sub(": 0", text), strict=False)


def _event(written: dict[str, Any]) -> Event:
    start, took = float(written["ts"]), float(written.get("dur", 0.0))
    thread = (written.get("pid"), written.get("tid"))
    return Event(str(written["name"]), KINDS[written["cat"]], start, start + took, thread, took)


def _nest(events: Iterable[Event]) -> None:
    """Take the time of each of the host's events from that of the event around it. Events come in order."""
    around: dict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for event in events:
        if event.kind in NESTED:
            open_ones = around[event.thread]
            while open_ones and open_ones[-1].end <= event.start:
                open_ones.pop()
            if open_ones:
                open_ones[-1].own -= event.elapsed
            open_ones.append(event)
