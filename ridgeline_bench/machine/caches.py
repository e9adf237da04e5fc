"""Probes of caches and latencies, by micros: none where these, or a compiler for them, are not installed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ridgeline_bench.machine.probes import Bench, Probe

LATENCIES = {"L2 latency": "L2, 16 MB", "memory latency": "memory, 512 MB"}  # probe → case of the micro `levels`
RATES = {"L2 read": "L2, 17 MB"}  # of `rates`
LAUNCHES = 5


def cache_probes(bench: Bench) -> list[Probe]:
    """Return probes of the seconds of a load that waits for the load before, and of the B/s that L2 gives."""
    if bench.device.type != "cuda" or find_spec("ridgeline.kernels.micro") is None or not _has_compiler():
        return []
    latencies = [Probe(name, "s", _seconds("levels", case)) for name, case in LATENCIES.items()]
    return latencies + [Probe(name, "B/s", _rate("rates", case)) for name, case in RATES.items()]


def _has_compiler() -> bool:
    return bool(import_module("ridgeline.kernels.cuda.compile").compilers())


def _seconds(name: str, case: str) -> Callable[[], float]:
    def run() -> float:
        asked = _asked(name, case)
        return statistics.median(each.seconds / sum(each.operations) for each in (asked() for _ in range(LAUNCHES)))

    return run


def _rate(name: str, case: str) -> Callable[[], float]:
    def run() -> float:
        asked = _asked(name, case)
        return statistics.median(sum(each.operations) / each.seconds for each in (asked() for _ in range(LAUNCHES)))

    return run


def _asked(name: str, part: str) -> Callable[[], Any]:
    """Return a launch of a micro's case, which has been launched once."""
    micros, run = (import_module(f"ridgeline.kernels.micro.{module}") for module in ("questions", "run"))
    micro = next(each for each in micros.micros() if each.name == name)
    asked = run.AskedMicro(micro, next(each for each in micro.cases if each.name == part))
    asked.ask()
    launch: Callable[[], Any] = asked.ask
    return launch
