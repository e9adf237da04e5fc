"""Rungs on a GPU: machine code from a folder, or compiled by NVRTC or nvcc, and launched by the CUDA driver.

`python -m ridgeline.kernels.memory_bound.run FOLDER sm_90` compiles all rungs for Hopper into a folder, each as it is
cut for rows from 1,024 to 262,144 numbers.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.kernels.cuda.carried import RungCode, arch_on, code_of, file_of, folder_and_archs
from ridgeline.kernels.cuda.driver import CudaDriver, Kernel
from ridgeline.kernels.memory_bound.launches import RESIDENT, MatrixShape, RungLaunch, launches, scratch, shared_bytes
from ridgeline.kernels.memory_bound.rungs import RUNGS, THREADS, MemoryRung, RowCut

DIVIDES = ("registers", "stays", "cluster")  # kinds that not every row fits
COLUMNS = tuple(1 << n for n in range(10, 19))


class LoadedRung:
    """A rung for matrices of one shape on the current CUDA device.

    cut: another one than the rung's own. folder: where its cubin lies; without one it is compiled.
    Raises NoCudaCompiler, CudaError and DriverError, and ValueError where the rung cannot take the shape.
    """

    def __init__(
        self, rung: MemoryRung, shape: MatrixShape, folder: Path | None = None, cut: RowCut | None = None,
        driver: CudaDriver | None = None,
    ) -> None:  # fmt: skip
        if not takes(rung, shape):
            raise ValueError(f"{rung.title} cannot take a matrix of {shape.rows} x {shape.columns}.")
        self.rung, self.shape, self.cut = rung, shape, cut or rung.cut(shape.columns)
        device = torch.cuda.current_device()
        found = rung.code(self.cut)
        arch = arch_on(found, torch.cuda.get_device_capability())
        divided = self.cut if rung.kind in ("stays", "cluster") else None
        shared = shared_bytes(rung, divided) if divided else 32 * 4
        code = code_of(found, arch, folder, __spec__.name)
        cluster = divided.cluster if divided else 1
        self._kernel = Kernel(
            driver or CudaDriver(), code, rung.kernel, device=device, shared=shared, cluster=cluster
        )  # fmt: skip
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self.blocks = multiprocessors * RESIDENT
        if rung.clusters and divided:
            self.blocks = cluster * self._kernel.clusters(divided.threads, cluster)
        elif rung.kind == "stays" and divided:
            self.blocks = multiprocessors * self._kernel.resident(divided.threads * divided.rows)
        elif rung.kind == "grid":
            self.blocks = multiprocessors * min(RESIDENT, self._kernel.resident(THREADS))
        self.launches = launches(rung, shape, self.cut, self.blocks)

    def bound(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """Return a call that reads and writes these tensors, on torch's current stream. All are contiguous.

        Names are those of `reference.inputs`, and "y" for the result. Scratch memory is the call's own.
        """
        x, y = tensors["x"], tensors["y"]
        middle = torch.empty(scratch(self.rung, self.shape, self.blocks), device=x.device, dtype=x.dtype)
        held = {**tensors, "scratch": middle}
        pointers = {name: ctypes.c_void_p(each.data_ptr()) for name, each in held.items()}
        pointers["up"] = ctypes.c_void_p(x.data_ptr() + self.shape.columns * x.element_size())
        ready: list[tuple[RungLaunch, Sequence[object]]] = [(each, each.bound(pointers)) for each in self.launches]

        def call(held: Mapping[str, Tensor] = held) -> None:  # the tensors live as long as the call
            if self.rung.kind == "adds":
                y.zero_()
            stream = torch.cuda.current_stream().cuda_stream
            for launch, arguments in ready:
                self._kernel.launch(launch.grid, launch.block, stream, arguments, together=launch.together)

        return call


def takes(rung: MemoryRung, shape: MatrixShape) -> bool:
    """Return True if a rung can take matrices of a shape."""
    sides = (shape.rows, shape.columns) if rung.kernel == "transpose" else (shape.columns,)
    divided = rung.kind not in DIVIDES or rung.cut(shape.columns) is not None
    return divided and all(side % rung.multiple == 0 for side in sides)


def runs_here(rung: MemoryRung) -> bool:
    """Return True if the current CUDA device can run the rung."""
    return arch_on(rung, torch.cuda.get_device_capability()) != ""


def codes(columns: Sequence[int] = COLUMNS) -> Iterator[RungCode]:
    """Yield the files and definitions of all rungs for rows of so many columns, each once."""
    found: dict[str, RungCode] = {}
    for rung in RUNGS:
        for count in columns:
            cut = rung.cut(count)
            if cut or rung.kind not in DIVIDES:
                code = rung.code(cut)
                found.setdefault(code.name, code)
    yield from found.values()


def main(folder: Path, archs: Sequence[str]) -> None:
    """Compile the rungs that run on these architectures ("sm_90") into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in archs:
        digits = name.removeprefix("sm_")
        for code in codes():
            if arch := arch_on(code, (int(digits[:-1]), int(digits[-1]))):
                (folder / file_of(code, arch)).write_bytes(code_of(code, arch, None, ""))


if __name__ == "__main__":
    main(*folder_and_archs(sys.argv, "ridgeline.kernels.memory_bound.run", "sm_90"))
