"""The time that a step's segments take on the device, measured without waiting for it."""

from __future__ import annotations

import time

import numpy as np
import torch

from ridgeline.parallel.stamps import SEGMENT, Arrived, Stamps, what


class Stopwatch:
    """A clock for the segments of a step. Use `with watch:` around each segment, and `seconds()` once the step is done.

    On CUDA the marks are events on the current stream: the device stamps them as it passes, and they are read only
    after the step's result has arrived. On a CPU the calling thread does the work, and its own clock serves.

    stamps: notes that the segments make on their way.
    """

    def __init__(self, device: torch.device, stamps: Stamps | None = None) -> None:
        self._stamps, self._taken = stamps, list[Arrived]()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._events: list[torch.cuda.Event] = []
        self._seconds = 0.0
        self._started = 0.0

    def __enter__(self) -> None:
        if self._stamps is not None:
            self._stamps.stamp(what(SEGMENT, end=False))
        if self._stream is not None:
            self._mark(self._stream)
        else:
            self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._mark(self._stream)
        else:
            self._seconds += time.perf_counter() - self._started
        if self._stamps is not None:
            self._stamps.stamp(what(SEGMENT, end=True))
            self._taken.append(self._stamps.take())

    @property
    def passed(self) -> bool:
        """True if the device has passed all marks."""
        return not self._events or self._events[-1].query()

    def seconds(self) -> float:
        """Return the sum over the segments, in seconds. On CUDA the device must have passed all marks."""
        starts, ends = self._events[::2], self._events[1::2]
        return self._seconds + sum(a.elapsed_time(b) for a, b in zip(starts, ends, strict=True)) / 1e3

    def notes(self) -> np.ndarray | None:
        """Return the segments' notes, or None if none were asked for. On CUDA the device must have passed all marks."""
        return np.concatenate([arrived() for arrived in self._taken]) if self._taken else None

    def _mark(self, stream: torch.cuda.Stream) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        self._events.append(event)
