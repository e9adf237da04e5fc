"""Probes of caches and latencies, by micros: none where these, or a compiler for them, are not installed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from ridgeline_bench.machine.probes import Bench, Probe

LAUNCHES = 5

Reading = Callable[[Any], float]  # of what a launch answered


def cache_probes(bench: Bench) -> list[Probe]:
    """Return probes of the seconds of a load that waits for the load before, and of the B/s that L2 gives."""
    if bench.device.type != "cuda" or find_spec("ridgeline.kernels.micro") is None or not _runs(bench.device):
        return []
    return [
        Probe("L2 latency", "s", _median(bench.device, "levels", "L2, 16 MB", _seconds)),
        Probe("memory latency", "s", _median(bench.device, "levels", "memory, 512 MB", _seconds)),
        Probe("L2 read", "B/s", _median(bench.device, "rates", "L2, 17 MB", lambda asked: 1 / _seconds(asked))),
    ]


def _seconds(asked: Any) -> float:
    return float(asked.seconds / sum(asked.operations))


def _median(device: torch.device, name: str, part: str, read: Reading) -> Callable[[], float]:
    def run() -> float:
        with torch.cuda.device(device):
            asked = import_module("ridgeline.kernels.micro.run").AskedMicro(*_case(name, part))
            asked.ask()  # fills caches
            return statistics.median(read(asked.ask()) for _ in range(LAUNCHES))

    return run


def _case(name: str, part: str) -> tuple[Any, Any]:
    """Return a micro and its case."""
    micros = import_module("ridgeline.kernels.micro.questions").micros()
    micro = next(each for each in micros if each.name == name)
    return micro, next(each for each in micro.cases if each.name == part)


def _runs(device: torch.device) -> bool:
    """Return True if a CUDA compiler is here, and the device's driver takes what it makes."""
    compiling, driver = (import_module(f"ridgeline.kernels.cuda.{module}") for module in ("compile", "driver"))
    try:
        with torch.cuda.device(device):
            import_module("ridgeline.kernels.micro.run").loaded(*_case("rates", "L2, 17 MB"))
        return True
    except (compiling.NoCudaCompiler, compiling.CudaError, driver.DriverError, OSError):
        return False
