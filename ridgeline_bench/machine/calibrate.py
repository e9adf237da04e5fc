"""Calibration: run every probe that makes sense on a device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime

import torch

from ridgeline.perf.calibration import Calibration, GemmRate
from ridgeline.worker.machine import device_name, driver_version
from ridgeline_bench.machine.caches import cache_probes
from ridgeline_bench.machine.host import bus_probes, launch_probes
from ridgeline_bench.machine.matmul import matmul_probes
from ridgeline_bench.machine.probes import Bench, Probe, memory_probes
from ridgeline_bench.machine.timing import FULL, QUICK

Measured = tuple[Probe, float]

FIELDS = {  # field of the record → probe
    "write": "write",
    "copy": "copy",
    "launch": "launch",
    "graph_node": "graph node",
    "host_to_device": "host to device pinned",
    "device_to_host": "device to host pinned",
    "l2_read": "L2 read",
    "l2_latency": "L2 latency",
    "memory_latency": "memory latency",
}


def probes(device: torch.device, *, quick: bool = False) -> list[Probe]:
    """Return the probes of this device, in order. On a CPU the caches and one thread alone are of interest too."""
    bench = Bench.of(device, QUICK if quick else FULL)
    if device.type == "cuda":
        host = launch_probes(bench) + bus_probes(bench)
        return memory_probes(bench) + cache_probes(bench) + host + matmul_probes(bench, quick=quick)
    return memory_probes(bench) + memory_probes(bench, threads=1) + matmul_probes(bench, quick=quick)


def measure(
    device: torch.device, *, quick: bool = False, progress: Callable[[str, float], None] = lambda what, fraction: None
) -> Iterator[Measured]:
    """Run the probes one by one, and leave the device's memory as it was. `progress` gets (what runs, share done)."""
    listed = probes(device, quick=quick)
    for index, probe in enumerate(listed):
        progress(probe.name, index / len(listed))
        yield probe, probe.run()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def as_calibration(device: torch.device, measured: Mapping[str, float]) -> Calibration:
    """Return the measurements (probe name → value) that the cost model uses."""
    kept = {field: measured.get(name) for field, name in FIELDS.items()}
    gemm = [_gemm_rate(name, value) for name, value in measured.items() if name.startswith("gemm ")]
    return Calibration(
        device=device_name(device),
        read=measured["read"],
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        gemm=tuple(gemm),
        torch=torch.__version__,
        driver=driver_version(device),
        **kept,
    )


def _gemm_rate(name: str, flops: float) -> GemmRate:
    """Return the rate with the shape of the probe's name, "gemm bfloat16 16x4096x2048"."""
    _, dtype, shape = name.split()
    m, n, k = (int(size) for size in shape.split("x"))
    return GemmRate(m, n, k, dtype, flops)
