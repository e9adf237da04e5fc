"""Micros on a GPU: machine code from a folder or compiled, data, launches, and what the kernel and the host check.

A cubin can be carried to a machine without a compiler: `python -m ridgeline.kernels.micro.run FOLDER sm_90` compiles
all cases into a folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import gcd
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.kernels.cuda.carried import RungCode, code_of, file_of, folder_and_archs
from ridgeline.kernels.cuda.driver import CudaDriver, Kernel
from ridgeline.kernels.micro.questions import Micro, MicroCase, micros

ARCH = "sm_90a"
MADE_BY = "ridgeline.kernels.micro.run"  # the module whose command fills a folder with cubins
KERNEL = "micro"
LINE = 128  # bytes of a line, the unit of rings
BUSY = 400_000  # cycles for which the device waits, so that the host's way to a launch is not measured
GOLDEN = (5**0.5 - 1) / 2
WORD = 2**32


class WrongAnswer(Exception):
    """A kernel's results are not what they must be, so that its time means nothing. The message says which."""


@dataclass(frozen=True)
class LaunchAnswer:
    """The answer of one launch: cycles, operations and sums, one for each entry, and the seconds that it took."""

    cycles: Sequence[int]
    operations: Sequence[int]
    seconds: float

    def value(self, case: MicroCase) -> float:
        """Return the figure of a case, in its unit.

        Of cycles the entry at the case's percentile counts; of rates that are by time, all of them.
        """
        if case.unit == "TB/s":
            return sum(self.operations) / self.seconds / 1e12
        if case.unit == "/ns":
            return sum(self.operations) / self.seconds / 1e9
        each = sorted(
            taken / done if case.unit == "cycles" else done / taken
            for taken, done in zip(self.cycles, self.operations, strict=True)
        )
        return each[min(len(each) * case.number("percentile", 50) // 100, len(each) - 1)]


class AskedMicro:
    """A case of a micro on the current CUDA device.

    folder: where its cubin lies; without one it is compiled. Raises NoCudaCompiler, CudaError and DriverError.
    """

    def __init__(self, micro: Micro, case: MicroCase, folder: Path | None = None) -> None:
        self.case = case
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self._kernel = loaded(micro, case, folder)
        self._grid = blocks(case.launch.get("grid", "1"), properties.multi_processor_count)
        self._entries = case.number("entries", self._grid)
        self._launches = 0
        self.n, self.step = case.number("n", 0), case.number("step", 1)
        if lines := case.number("lines", 0):
            self.n, self.step = lines, case.number("step", golden(lines))
            self._data = ring(lines, self.step)
        else:
            turn = self._grid * case.number("block", 32) * case.number("flight", 0)
            self.n = max(1, self.n // turn) * turn if turn else self.n
            self._data = words(case, self.n)
        self._sum = expected(case, self._data, self._grid)

    def ask(self) -> LaunchAnswer:
        """Launch the kernel once. Raises WrongAnswer."""
        case, rounds = self.case, self.case.number("rounds", 1)
        start = self._launches * rounds * self.step % self.n if case.number("fresh", 0) else 0
        self._launches += 1
        if case.launch.get("check") == "total":
            self._data.zero_()
        out = torch.full((self._entries, 4), -1, device="cuda", dtype=torch.int64)
        numbers = map(ctypes.c_uint, (self.n, self.step, start, rounds))
        arguments = [ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(self._data.data_ptr()), *numbers]
        seconds = timed(lambda stream: self._kernel.launch(
            (self._grid, 1, 1), (case.number("block", 32), 1, 1), stream, arguments
        ))  # fmt: skip
        cycles, operations, wrong, sums = out.cpu().unbind(1)
        if int(wrong.abs().sum()):
            raise WrongAnswer(f"{int(wrong.ne(0).sum())} of {len(wrong)} entries say that results are wrong.")
        found = self._data.sum() if case.launch.get("check") == "total" else sums.sum()
        if self._sum is not None and (int(found) - self._sum) % WORD:
            raise WrongAnswer(f"the sum is {int(found) % WORD}, not {self._sum % WORD}.")
        return LaunchAnswer(cycles.tolist(), operations.tolist(), seconds)

    def samples(self, launches: int = 5) -> list[float]:
        """Return the figures of some launches, after one that fills caches. Raises WrongAnswer."""
        self.ask()
        return [self.ask().value(self.case) for _ in range(launches)]


def loaded(micro: Micro, case: MicroCase, folder: Path | None = None, shared: int | None = None) -> Kernel:
    """Return the kernel of a case on the current CUDA device.

    folder: where its cubin lies; without one it is compiled. shared: bytes of dynamic shared memory, by default the
    case's. Raises NoCudaCompiler, CudaError, DriverError, and OSError without a driver.
    """
    torch.cuda.synchronize()  # makes the context that the driver's functions work in
    cubin = code_of(code(micro, case), arch_here(), folder, MADE_BY)
    wanted = case.number("shared", 0) if shared is None else shared
    return Kernel(CudaDriver(), cubin, KERNEL, device=torch.cuda.current_device(), shared=wanted)


def timed(launch: Callable[[int], object]) -> float:
    """Return the device's seconds of a launch on torch's current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream()
    torch.cuda._sleep(BUSY)
    begin.record(stream)
    launch(stream.cuda_stream)
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def blocks(grid: str, multiprocessors: int) -> int:
    """Return the blocks that a setting means: "132", "all" for one a multiprocessor, "2x" for two."""
    if grid == "all":
        return multiprocessors
    return int(grid[:-1]) * multiprocessors if grid.endswith("x") else int(grid)


def golden(lines: int) -> int:
    """Return a step without a divisor in common with `lines`, near their golden section: neighbours in such a ring lie
    far apart."""
    step = max(1, int(lines * GOLDEN))
    while gcd(step, lines) > 1:
        step += 1
    return step


def ring(lines: int, step: int) -> Tensor:
    """Return lines of 128 bytes, each of which begins with the address of the line `step` further, and an empty one."""
    data = torch.zeros(lines + 1, LINE // 8, device="cuda", dtype=torch.int64)
    at = torch.arange(lines, device="cuda", dtype=torch.int64)
    data[:lines, 0] = data.data_ptr() + (at + step) % lines * LINE
    return data


def words(case: MicroCase, n: int) -> Tensor:
    """Return the random words of 32 bits that a case reads or adds to, as many as n of its pieces have."""
    check = case.launch.get("check", "")
    piece = {"total": 4, "strided": 4}.get(check, 16)  # bytes of one of n
    count = case.number("bytes", max(n * piece, 4096)) // 4
    return torch.randint(-(2**31), 2**31, (count,), device="cuda", dtype=torch.int32)


def expected(case: MicroCase, data: Tensor, grid: int) -> int | None:
    """Return the sum that all blocks, or the data themselves, must have, or None where nothing is said."""
    check, rounds, threads = case.launch.get("check"), case.number("rounds", 1), grid * case.number("block", 32)
    if check in ("sum", "each"):
        return int(data.sum()) * rounds * case.number("times", grid if check == "each" else 1)
    if check == "strided":
        return int(data[:: case.number("step", 1)].sum())
    return rounds * threads * 5 // 2 if check == "total" else None  # threads add 1 to 4 in turn


def arch_here() -> str:
    """Return the architecture of the current device, as `arch_of` does."""
    major, minor = torch.cuda.get_device_capability()
    return arch_of(f"sm_{major}{minor}")


def arch_of(name: str) -> str:
    """Return the architecture that code for a device ("sm_90") has: of Hopper all that it can do ("sm_90a")."""
    return ARCH if name == ARCH.removesuffix("a") else name


def code(micro: Micro, case: MicroCase) -> RungCode:
    """Return the code of a case. Cases with the same definitions share it."""
    which = hashlib.sha256(json.dumps(sorted(case.defines.items())).encode()).hexdigest()[:12]
    return RungCode(f"{micro.source.stem}.{which}", micro.source, ARCH, case.defines)


def codes() -> Iterator[RungCode]:
    """Yield each file and its definitions, once, of micros whose kernel is launched."""
    found: dict[str, RungCode] = {}
    for micro in micros():
        for case in () if micro.compiled else micro.cases:
            each = code(micro, case)
            found.setdefault(each.name, each)
    yield from found.values()


def main(folder: Path, archs: Sequence[str]) -> None:
    """Compile all cases for these architectures ("sm_90") into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    todo = [(each, arch_of(name)) for name in archs for each in codes()]

    def write(each: RungCode, arch: str) -> None:
        (folder / file_of(each, arch)).write_bytes(code_of(each, arch, None, MADE_BY))

    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: write(*one), todo))


if __name__ == "__main__":
    main(*folder_and_archs(sys.argv, MADE_BY, "sm_90"))
