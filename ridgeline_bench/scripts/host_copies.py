"""Copies that overlap kernels, and the NUMA node from which they run.

    python -m ridgeline_bench.scripts.host_copies [--megabytes 256] [--pieces 1 2 4 8 16 32] [--numa]
        [--output results.jsonl] [--quick]

An array goes to the device, a kernel works on it, and it comes back. In one piece the three follow each other. In
pieces, with a stream for each, a copy to the device, a kernel and a copy back run at once, because a GPU has an engine
for each direction. With p pieces the time is then

    (to + kernel + back) / p + (p - 1) / p x the longest of the three

so half a piece's worth of it is won from p = 2 on, and more pieces win little until starts of copies cost more than
they hide. Pageable memory cannot overlap: the driver copies it through a buffer of its own, on the host's time.

--numa runs the copies in processes that keep to the cores and the memory of one NUMA node each, and names the device's
own. --quick prints the predictions alone, for the rates of a data sheet, and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.core import numa
from ridgeline.worker.machine import pci_address
from ridgeline_bench.results import host_with
from ridgeline_bench.scripts.asked import asked, keep

ROUNDS = 7
PASSES = 24  # of the kernel over its piece: about as long as a copy on a Hopper GPU
SHEET = (55e9, 55e9, 55e9)  # B/s to the device, of the kernel, and back: PCIe of generation 5


@dataclass(frozen=True)
class Parts:
    """Seconds of each part alone, for the whole array."""

    to: float
    kernel: float
    back: float

    def overlapped(self, pieces: int) -> float:
        """Return the seconds of so many pieces, of which a copy each way and a kernel run at once."""
        alone = self.to + self.kernel + self.back
        return alone / pieces + (pieces - 1) / pieces * max(self.to, self.kernel, self.back)


def seconds(work: Callable[[], None]) -> float:
    """Return the median seconds of a call and of all that it leaves to the device."""
    taken = []
    for _ in range(2 + ROUNDS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[2:])


class Pipeline:
    """Arrays on both sides, and three streams of the device."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        count = nbytes // 4
        self._source, self._target = (torch.rand(count, pin_memory=pinned) for _ in range(2))
        self._there = torch.empty(count, device="cuda")
        self._streams = [torch.cuda.Stream() for _ in range(3)]

    def parts(self) -> Parts:
        return Parts(
            to=seconds(lambda: self._copy(self._there, self._source)),
            kernel=seconds(lambda: _work(self._there)),
            back=seconds(lambda: self._copy(self._target, self._there)),
        )

    def run(self, pieces: int) -> None:
        """Begin all pieces. The next piece's copy runs while this one is worked on, and the last one's comes back."""
        up, work, down = self._streams
        arrays = zip(*(x.chunk(pieces) for x in (self._source, self._there, self._target)), strict=True)
        for source, there, target in arrays:
            with torch.cuda.stream(up):
                self._copy(there, source)
            work.wait_stream(up)
            with torch.cuda.stream(work):
                _work(there)
            down.wait_stream(work)
            with torch.cuda.stream(down):
                self._copy(target, there)

    @staticmethod
    def _copy(target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def right(self) -> bool:
        """Return True if what came back is what one piece gives."""
        self.run(1)
        torch.cuda.synchronize()
        expected = self._target.clone()
        self._target.zero_()
        self.run(8)
        torch.cuda.synchronize()
        return torch.equal(self._target, expected)


def _work(x: Tensor) -> None:
    for _ in range(PASSES):
        x.mul_(0.999)


class Timed(NamedTuple):
    """So many pieces: what they took, and what the parts alone predict."""

    memory: str
    pieces: int
    seconds: float
    predicted: float


class Near(NamedTuple):
    """Copies of a process that keeps to a NUMA node: B/s each way, and the seconds of a launch."""

    node: int
    own: bool
    to_rate: float
    back_rate: float
    launch_seconds: float


def study(nbytes: int, pieces: Sequence[int], *, pinned: bool) -> Iterator[Timed]:
    pipeline = Pipeline(nbytes, pinned=pinned)
    if not pipeline.right():
        raise SystemExit("pieces on three streams gave other numbers than one piece; nothing was timed.")
    parts = pipeline.parts()
    for count in pieces:
        taken = seconds(partial(pipeline.run, count))
        yield Timed("page-locked" if pinned else "pageable", count, taken, parts.overlapped(count))


def near_and_far(megabytes: int) -> Iterator[Near]:
    """Yield what each NUMA node gives, measured by a process that keeps to it."""
    own, usable = numa.node_of(pci_address(torch.device("cuda", 0))), os.sched_getaffinity(0)
    for node, cores in numa.nodes().items():
        if cores & usable:
            command = [sys.executable, "-m", __spec__.name, "--on-node", str(node), "--megabytes", str(megabytes)]
            said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            yield Near(node, node == own, *said)


def on_node(node: int, nbytes: int) -> tuple[float, float, float]:
    numa.keep_to(node, numa.nodes()[node] & os.sched_getaffinity(0))
    parts = Pipeline(nbytes, pinned=True).parts()
    one = torch.empty(1, device="cuda")
    return nbytes / parts.to, nbytes / parts.back, seconds(lambda: _work(one)) / PASSES


def main() -> None:
    given = asked(
        __doc__, megabytes=256, pieces=[1, 2, 4, 8, 16, 32], numa=False, on_node=(int, argparse.SUPPRESS), output=Path,
        commit="", quick=(False, "predictions alone, without a GPU"),
    )  # fmt: skip
    nbytes = given.megabytes << 20
    if given.quick:
        parts = Parts(*(nbytes / rate for rate in SHEET))
        for count in given.pieces:
            print(f"{count:3} pieces {1e3 * parts.overlapped(count):8.2f} ms predicted")
        return
    if not torch.cuda.is_available():
        raise SystemExit("copies to a device need a GPU; --quick prints the predictions without one.")
    if given.on_node is not None:
        print(json.dumps(on_node(given.on_node, nbytes)))
        return
    here = {"machine": asdict(host_with(torch.device("cuda"), given.commit)), "megabytes": given.megabytes}
    for timed in (timed for pinned in (True, False) for timed in study(nbytes, given.pieces, pinned=pinned)):
        print(f"{timed.memory:12}{timed.pieces:3} pieces {1e3 * timed.seconds:8.2f} ms, "
              f"predicted {1e3 * timed.predicted:8.2f}", flush=True)  # fmt: skip
        keep(given.output, {"workload": "copies that overlap kernels", **here, **timed._asdict()})
    for near in near_and_far(given.megabytes) if given.numa else ():
        print(f"node {near.node}{' (the device is here)' if near.own else ''}: {near.to_rate / 1e9:.1f} GB/s to it, "
              f"{near.back_rate / 1e9:.1f} back, {1e6 * near.launch_seconds:.2f} µs a launch", flush=True)  # fmt: skip
        keep(given.output, {"workload": "copies from a NUMA node", **here, **near._asdict()})


if __name__ == "__main__":
    main()
