"""The probes of a calibration, each of which measures one number about the machine at hand.

Buffers are several times the last-level cache and filled with random numbers. Zeros switch fewer transistors, so a GPU
at its power limit runs them faster than real data.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ridgeline_bench.machine.timing import Effort, median_seconds

MIB = 1 << 20
TILE = 1 << 22  # random numbers, repeated through a buffer: far more than any cache line or compressor looks at
MAX_COPIES = 32
MEMORY_SHARE = 0.1  # the most that one buffer takes of the free memory


@dataclass(frozen=True)
class Probe:
    """One probe. `run` returns B/s, FLOP/s or seconds, as `unit` says."""

    name: str
    unit: str
    run: Callable[[], float]


@dataclass(frozen=True)
class Bench:
    """The device to measure and the effort for it. `cache` and `free` are bytes of the last-level cache and of free
    memory."""

    device: torch.device
    effort: Effort
    cache: int
    free: int

    @staticmethod
    def of(device: torch.device, effort: Effort) -> Bench:
        if device.type == "cuda":
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            return Bench(device, effort, cache, torch.cuda.mem_get_info(device)[0])
        return Bench(device, effort, _cpu_cache(), os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

    def seconds(self, *calls: Callable[[], object]) -> float:
        return median_seconds(calls, self.device, self.effort)

    def buffer(self) -> Tensor:
        """Return float32 random numbers, several times the cache and at most a tenth of the free memory."""
        wanted = max(self.effort.caches * self.cache, 256 * MIB if self.device.type == "cpu" else 4096 * MIB)
        tiles = max(1, int(min(wanted, self.free * MEMORY_SHARE)) // (4 * TILE))
        return torch.rand(TILE, device=self.device).repeat(tiles)

    def copies(self, tensor_bytes: int) -> int:
        """Return the number of such tensors to rotate through so that none is still in the cache (small ones may
        be)."""
        fitting = max(1, int(self.free * 4 * MEMORY_SHARE) // tensor_bytes)
        return min(MAX_COPIES, fitting, max(1, math.ceil(self.effort.caches * self.cache / tensor_bytes)))


def memory_probes(bench: Bench, threads: int | None = None) -> list[Probe]:
    """Return probes of device memory. `threads` are the CPU threads to use (None: all). A copy counts bytes read plus
    written."""
    suffix = "" if threads is None else f" {threads} thread"

    def rate(work: Callable[[Tensor, Tensor], object], passes: int) -> Callable[[], float]:
        def run() -> float:
            x = bench.buffer()
            y = torch.empty_like(x)
            with cpu_threads(threads):
                return passes * x.nbytes / bench.seconds(lambda: work(x, y))

        return run

    return [
        Probe(f"read{suffix}", "B/s", rate(lambda x, y: x.sum(), 1)),
        Probe(f"write{suffix}", "B/s", rate(lambda x, y: y.fill_(1.5), 1)),
        # This is a kernel and not `copy_`, which is captured as a memcpy node: copy engines run that at two thirds of
        # the rate.
        Probe(f"copy{suffix}", "B/s", rate(lambda x, y: torch.neg(x, out=y), 2)),
    ]


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Use this number of torch's CPU threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cpu_cache() -> int:
    """Return the bytes of the largest cache of CPU 0, or 32 MiB if the system does not say."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return max([int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units], default=32 * MIB)
