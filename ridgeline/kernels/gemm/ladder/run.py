"""Rungs on a GPU: machine code from a folder, or compiled by NVRTC or nvcc, and launched by the CUDA driver.

A cubin can be carried to a machine without a compiler: `python -m ridgeline.kernels.gemm.ladder.run FOLDER sm_90`
compiles all rungs for Hopper into a folder, and `LoadedRung` takes its files from there.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.cuda import carried
from ridgeline.kernels.cuda.carried import arch_on, file_of
from ridgeline.kernels.cuda.compile import NoCudaCompiler
from ridgeline.kernels.cuda.driver import CudaDriver, Kernel, tensor_map
from ridgeline.kernels.gemm.ladder.cute_rung import cute_cubin, cute_file
from ridgeline.kernels.gemm.ladder.cutlass_rungs import write_rungs
from ridgeline.kernels.gemm.ladder.endings import ENDINGS
from ridgeline.kernels.gemm.ladder.other_gpus import PAIRS
from ridgeline.kernels.gemm.ladder.rungs import RUNGS, VARIANTS, Extras, Rung, Variant

BOX_BYTES = 128  # of a row of a box


class LoadedRung:
    """A rung on the current CUDA device.

    folder: where its cubin lies; without one it is compiled. Raises NoCudaCompiler, CudaError and DriverError.
    """

    def __init__(self, rung: Rung, folder: Path | None = None, driver: CudaDriver | None = None) -> None:
        self.rung = rung
        self._driver = driver or CudaDriver()
        device = torch.cuda.current_device()
        arch = arch_on(rung, torch.cuda.get_device_capability())
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._kernel = Kernel(self._driver, code_of(rung, arch, folder), "gemm", device=device, shared=rung.shared)

    def __call__(self, a_MK: Tensor, b_NK: Tensor, c_MN: Tensor, extras: Extras | None = None) -> None:
        """Write A · Bᵀ to C, on torch's current stream. All three are contiguous, on the rung's device.

        extras: what the rung's epilogue reads.
        """
        (m, k), n = a_MK.shape, len(b_NK)
        grid = self.rung.grid(m, n, self._multiprocessors)
        sizes = map(ctypes.c_int, (m, n, k))
        arguments: list[Any] = [*(self._operand(x, at) for at, x in enumerate((a_MK, b_NK, c_MN))), *sizes]
        if self.rung.extras:
            arguments.append(extras or Extras())
        self._kernel.launch(grid, (*self.rung.block, 1), torch.cuda.current_stream().cuda_stream, arguments)

    def _operand(self, x: Tensor, at: int) -> ctypes.Array[ctypes.c_ubyte] | ctypes.c_void_p:
        if at >= len(self.rung.boxes):
            return ctypes.c_void_p(x.data_ptr())
        rows, columns = x.shape
        item = x.element_size()
        return tensor_map(self._driver, (x.data_ptr(), rows, columns), item, (self.rung.boxes[at], BOX_BYTES // item))


class LoadedCeiling:
    """A WMMA shape and format in registers alone, on the current CUDA device: a call does `flops` FLOPs, or few more.

    folder: where its cubin lies; without one it is compiled. Raises NoCudaCompiler, CudaError and DriverError.
    """

    def __init__(
        self, variant: Variant, flops: float, folder: Path | None = None, driver: CudaDriver | None = None
    ) -> None:
        self.variant = variant
        device = torch.cuda.current_device()
        arch = arch_on(variant.ceiling, torch.cuda.get_device_capability())
        code = code_of(variant.ceiling, arch, folder)
        self._kernel = Kernel(driver or CudaDriver(), code, "ceiling", device=device)
        self._blocks = torch.cuda.get_device_properties(device).multi_processor_count
        self.rounds = variant.rounds(flops, self._blocks)
        sums = torch.int32 if variant.result == "int32" else torch.float32
        self._out = torch.zeros(self._blocks * variant.ceiling.block[0], device="cuda", dtype=sums)
        self._a, self._b = (numbers(torch.randn(64, variant.shape[2], device="cuda"), variant) for _ in range(2))

    def __call__(self) -> None:
        """Multiply, on torch's current stream."""
        pointers = (ctypes.c_void_p(x.data_ptr()) for x in (self._out, self._a, self._b))
        arguments = [*pointers, ctypes.c_int(self.rounds)]
        block = (*self.variant.ceiling.block, 1)
        self._kernel.launch((self._blocks, 1, 1), block, torch.cuda.current_stream().cuda_stream, arguments)

    def fault(self) -> str:
        """Run it once, and return what is wrong with the sums, or ""."""
        self()
        found = self._out.view(-1, 32).double().sum(1)  # of each warp
        wanted = self.rounds * (self._a.double() @ self._b.double().T).sum()
        size = self.rounds * (self._a.double().abs() @ self._b.double().abs().T).sum()
        # a round is off by two units of a sum at most, and tf32 by 2**-11 of an operand
        parts = {"int32": 0.0}.get(self.variant.result, self.rounds * 2**-22)
        off = size * (parts + (2**-10 if self.variant.dtype == "float32" else 0))
        return "" if bool(((found - wanted).abs() <= off).all()) else f"the sums of warps are not {float(wanted):g}"


def numbers(x: Tensor, variant: Variant) -> Tensor:
    """Return numbers in a variant's format. Integers are small, so that float32 holds their sums."""
    return (3 * x).clamp(-9, 9).to(torch.int8) if variant.dtype == "int8" else x.to(getattr(torch, variant.dtype))


def code_of(rung: Rung, arch: str, folder: Path | None = None) -> bytes:
    """Return a rung's cubin for an architecture, from a folder or compiled, as `carried.code_of` does."""
    return carried.code_of(rung, arch, folder, "ridgeline.kernels.gemm.ladder.run")


def runs_here(rung: Rung) -> bool:
    """Return True if the current CUDA device can run the rung."""
    return arch_on(rung, torch.cuda.get_device_capability()) != ""


def main(folder: Path, archs: Sequence[str]) -> None:
    """Compile the rungs that run on these architectures ("sm_90") into a folder, each for each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in archs:
        digits = name.removeprefix("sm_")
        variants = (rung for each in VARIANTS for rung in (each.product, each.ceiling))
        for rung in (*RUNGS, PAIRS, *(each.rung for each in ENDINGS), *variants):
            if arch := arch_on(rung, (int(digits[:-1]), int(digits[-1]))):
                (folder / file_of(rung, arch)).write_bytes(code_of(rung, arch))
    for write in _of_extras(folder) if "sm_90" in archs else ():
        try:
            write()
        except NoCudaCompiler as none:
            print(none)


def _of_extras(folder: Path) -> Iterator[Callable[[], object]]:
    """Yield a function for the CuTe DSL and one for CUTLASS, which writes their rungs or lacks its packages."""
    yield lambda: cute_file(folder).write_bytes(cute_cubin())
    yield lambda: write_rungs(folder)


if __name__ == "__main__":
    main(*carried.folder_and_archs(sys.argv, "ridgeline.kernels.gemm.ladder.run", "sm_90"))
