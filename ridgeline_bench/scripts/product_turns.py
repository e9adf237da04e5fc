"""A rung of the GEMM ladder beside cuBLAS in two kinds of turns, with the clock of each.

    python -m ridgeline_bench.scripts.product_turns [--rungs async_stores] [--sizes 4096 8192] [--seconds 0.4]
        [--rounds 4] [--cubins FOLDER] [--commit ""] [--output FILE.jsonl]

call by call    each multiplies four sets of operands, then the other one does. All share a clock, so a product that
                takes little power pays for the others.
alone           each multiplies for `seconds` at a time, in turn, so it has the clock that its own power leaves. An
                engine sees that. The first half of a turn is not counted.

Under load a GPU keeps to its power limit by its clock, which is the mean of samples by NVML. Every call is compared
with cuBLAS' product in float32 before it is timed.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ridgeline_bench.ladders.gemm import Matrices
from ridgeline_bench.ladders.runs import Call
from ridgeline_bench.machine.timing import device_seconds
from ridgeline_bench.results import host_with
from ridgeline_bench.scripts.asked import asked, keep

SM_CLOCK = 1  # an nvmlClockType_t


class Meter:
    """The clock of torch's current GPU, which may be another one for NVML. Raises OSError where NVML is not, and
    RuntimeError if it does not know the GPU."""

    def __init__(self, library: str = "libnvidia-ml.so.1") -> None:
        self._nvml, self._gpu = ctypes.CDLL(library), ctypes.c_void_p()
        self._nvml.nvmlInit_v2()
        name = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        if code := self._nvml.nvmlDeviceGetHandleByUUID(ctypes.c_char_p(name.encode()), ctypes.byref(self._gpu)):
            raise RuntimeError(f"NVML found no {name} (its error {code}).")

    def megahertz(self) -> int:
        """Return the multiprocessors' clock now."""
        found = ctypes.c_uint()
        self._nvml.nvmlDeviceGetClockInfo(self._gpu, SM_CLOCK, ctypes.byref(found))
        return found.value


def captured(calls: Sequence[Call]) -> Callable[[], None]:
    """Return all calls as one graph."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def alone(replay: Call, products: int, seconds: float, meter: Meter) -> dict[str, float]:
    """Run a graph of so many products for `seconds`, and return µs of a product of the second half, and the mean clock
    there."""
    each = device_seconds(replay, 4)
    half = max(1, round(seconds / 2 / each))
    for _ in range(half):
        replay()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(half):
        replay()
    end.record()
    clocks = []
    while not end.query():
        clocks.append(meter.megahertz())
        time.sleep(5e-3)
    return {"us": 1e3 * float(begin.elapsed_time(end)) / (half * products), "mhz": statistics.fmean(clocks)}


def measured(size: int, given: Any) -> dict[str, Any]:
    """Return the medians of both kinds of turns, by name: µs, and of turns alone MHz."""
    operands = Matrices(size, size, given.cubins)
    ways = {"cuBLAS": operands.peers["cuBLAS"]}
    for name in given.rungs:
        if (own := operands.rung(name)) is None:
            raise SystemExit(f"{name} is a rung for another GPU.")
        ways[name] = own
    for name, calls in ways.items():
        if fault := operands.fault(calls[0], name):
            raise SystemExit(f"{name}, {size}³: {fault}")
    graphs, count = {name: captured(calls) for name, calls in ways.items()}, len(ways["cuBLAS"])
    turns: dict[str, list[float]] = {name: [] for name in ways}
    until = time.monotonic() + given.seconds * len(ways)
    while time.monotonic() < until:
        for name, replay in graphs.items():
            turns[name].append(1e6 * device_seconds(replay) / count)
    by_call = {name: statistics.median(found[len(found) // 2 :]) for name, found in turns.items()}
    meter, lone = Meter(), dict[str, list[dict[str, float]]]()
    for _ in range(given.rounds):
        for name, replay in graphs.items():
            lone.setdefault(name, []).append(alone(replay, count, given.seconds, meter))
    found = {
        name: {key: round(statistics.median(each[key] for each in rows), 4) for key in rows[0]}
        for name, rows in lone.items()
    }
    each = {name: [round(row["us"], 2) for row in rows] for name, rows in lone.items()}
    return {"size": size, "us, call by call": by_call, "alone": found, "us, alone": each}


def main() -> None:
    given = asked(
        __doc__, rungs=["async_stores"], sizes=[4096, 8192], seconds=0.4, rounds=4, cubins=Path,
        commit=("", "of the checkout, where git cannot say it"), output=Path,
    )  # fmt: skip
    machine, out = asdict(host_with(torch.device("cuda"), given.commit)), Console(width=150, highlight=False)
    for size in given.sizes:
        row, flops = measured(size, given), 2e-6 * size**3
        by_call, lone = row["us, call by call"], row["alone"]
        for name, found in lone.items():
            out.print(
                f"{size}³ {name:14} call by call {flops / by_call[name]:6.1f} TFLOP/s, "
                f"{by_call['cuBLAS'] / by_call[name]:.3f}; alone {flops / found['us']:6.1f}, "
                f"{lone['cuBLAS']['us'] / found['us']:.3f} ({found['mhz']:.0f} MHz)"
            )
        keep(given.output, {"machine": machine, "workload": "product turns", "seconds": given.seconds, **row})


if __name__ == "__main__":
    main()
