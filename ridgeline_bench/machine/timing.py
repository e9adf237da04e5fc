"""Timing of work on a device, in the one way we do it: medians over repetitions, after a warm-up, by the device's own
clock."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

BATCH_SECONDS = 2e-3  # in a batch this long an event's resolution and a graph's launch (a few µs) are less than 1 %
MAX_CALLS = 512  # in one batch
MAX_REPEATS = 5000


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The effort for one quantity: at least `seconds` and at least `repeats` batches, after a third as many for
    warm-up.

    A probe of memory goes through data `caches` times as large as the last-level cache. The larger it is, the less of
    it the next pass finds there.
    """

    seconds: float
    repeats: int
    caches: int = 4


FULL = Effort(seconds=0.4, repeats=15)
QUICK = Effort(seconds=0.04, repeats=3, caches=2)


def median_seconds(calls: Sequence[Call], device: torch.device, effort: Effort = FULL) -> float:
    """Return the seconds of one call, the median over batches; a batch runs all `calls` in turn.

    Give several calls over different data if caches must not help. On CUDA a batch is one captured graph, so host time
    does not count. Calls that cannot be captured are launched one by one, and their host time may show.
    """
    with torch.inference_mode():
        return _on_gpu(calls, device, effort) if device.type == "cuda" else _on_cpu(calls, effort)


def host_seconds(call: Call, device: torch.device, *, calls: int, effort: Effort = FULL) -> float:
    """Return the host's seconds for one `call` when `calls` of them are queued on an idle device (median)."""
    times = []
    for _ in range(3 + effort.repeats):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - started) / calls)
    torch.cuda.synchronize(device)
    return statistics.median(times[3:])


def device_seconds(work: Call, times: int = 1) -> float:
    """Return the device's seconds of a call, or the mean of several, by events on the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times


def _on_cpu(calls: Sequence[Call], effort: Effort) -> float:
    def batch() -> float:
        started = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - started

    batch()
    repeats = _repeats(batch(), effort)
    times = [batch() for _ in range(repeats // 3 + repeats)]
    return statistics.median(times[repeats // 3 :]) / len(calls)


def _on_gpu(calls: Sequence[Call], device: torch.device, effort: Effort) -> float:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # the data may still be under way on the current stream
    with torch.cuda.device(device), torch.cuda.stream(stream):
        _timed(calls, stream, 1)
        estimate = min(_timed(calls, stream, 3))
        rounds = min(math.ceil(BATCH_SECONDS / estimate), max(1, MAX_CALLS // len(calls)))
        batch = _captured([*calls] * rounds, stream)
        repeats = _repeats(min(_timed([batch], stream, 3)), effort)
        _timed([batch], stream, repeats // 3 + 1)
        return statistics.median(_timed([batch], stream, repeats)) / (rounds * len(calls))


def _timed(calls: Sequence[Call], stream: torch.cuda.Stream, repeats: int) -> list[float]:
    """Return the seconds of each of `repeats` runs of all calls. All are queued before any is read."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in marks:
        start.record(stream)
        for call in calls:
            call()
        end.record(stream)
    stream.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in marks]


def _captured(calls: Sequence[Call], stream: torch.cuda.Stream) -> Call:
    """Return all calls as one graph, or one after the other if they cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    except RuntimeError:
        torch.cuda.synchronize(stream.device)
        return lambda: [call() for call in calls]
    return graph.replay


def _repeats(seconds: float, effort: Effort) -> int:
    return min(MAX_REPEATS, max(effort.repeats, math.ceil(effort.seconds / max(seconds, 1e-9))))
