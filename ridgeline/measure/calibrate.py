"""`calibrate`: run every probe that makes sense on a device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import torch

from ridgeline.measure.host import bus_probes, launch_probes
from ridgeline.measure.matmul import matmul_probes
from ridgeline.measure.probes import Bench, Probe, memory_probes
from ridgeline.measure.timing import FULL, QUICK

Measured = tuple[Probe, float]


def probes(device: torch.device, *, quick: bool = False) -> list[Probe]:
    """What is measured on this device, in order. On a CPU the caches and one thread alone are of interest too."""
    bench = Bench.of(device, QUICK if quick else FULL)
    if device.type == "cuda":
        return memory_probes(bench) + launch_probes(bench) + bus_probes(bench) + matmul_probes(bench, quick=quick)
    return memory_probes(bench) + memory_probes(bench, threads=1) + matmul_probes(bench, quick=quick)


def measure(
    device: torch.device, *, quick: bool = False, progress: Callable[[str, float], None] = lambda what, fraction: None
) -> Iterator[Measured]:
    """Run the probes one by one, leaving the device's memory as it was. progress: (what runs, share done)."""
    listed = probes(device, quick=quick)
    for index, probe in enumerate(listed):
        progress(probe.name, index / len(listed))
        yield probe, probe.run()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
