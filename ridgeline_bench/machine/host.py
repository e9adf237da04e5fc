"""Probes of the host's part: launches, graph nodes, and the bus between host and device. CUDA only."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from ridgeline_bench.machine.probes import MIB, Bench, Probe
from ridgeline_bench.machine.timing import host_seconds

QUEUED = 256  # launches timed at once: enough to average, few enough not to fill the driver's queue


def launch_probes(bench: Bench) -> list[Probe]:
    """Return probes of the host seconds of one eager torch launch and of one graph replay, and of the device seconds of
    one tiny node of a graph."""
    device = bench.device

    def tiny() -> Callable[[], object]:
        x = torch.rand(1, device=device)
        return lambda: x.add_(1)

    def replay() -> float:
        graph, node = torch.cuda.CUDAGraph(), tiny()
        with torch.cuda.device(device), torch.cuda.graph(graph):
            node()
        return host_seconds(graph.replay, device, calls=QUEUED, effort=bench.effort)

    return [
        Probe("launch", "s", lambda: host_seconds(tiny(), device, calls=QUEUED, effort=bench.effort)),
        Probe("graph launch", "s", replay),
        Probe("graph node", "s", lambda: bench.seconds(tiny())),
    ]


def bus_probes(bench: Bench) -> list[Probe]:
    """Return probes of the B/s between host and device, each way, from pinned and from ordinary (pageable) memory."""

    def rate(*, pinned: bool, to_device: bool) -> Callable[[], float]:
        def run() -> float:
            host = torch.rand(256 * MIB // 4)
            host = host.pin_memory() if pinned else host
            there = torch.empty(host.shape, device=bench.device)
            source, target = (host, there) if to_device else (there, host)
            return host.nbytes / _waited(lambda: target.copy_(source), bench)

        return run

    return [
        Probe(f"{'host to device' if to_device else 'device to host'} {kind}", "B/s", work)
        for kind, pinned in (("pinned", True), ("pageable", False))
        for to_device in (True, False)
        for work in [rate(pinned=pinned, to_device=to_device)]
    ]


def _waited(copy: Callable[[], object], bench: Bench) -> float:
    """Return the median seconds from the call to the end of the copy. A pageable copy is the host's work as much as the
    bus's."""
    times = []
    for _ in range(3 + bench.effort.repeats):
        torch.cuda.synchronize(bench.device)
        started = time.perf_counter()
        copy()
        torch.cuda.synchronize(bench.device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[3:])
