"""Rungs on a GPU: compiled by NVRTC or nvcc, loaded and launched through cuda-core.

A cubin can be carried to a machine without a compiler: `python -m ridgeline.kernels.gemm.ladder.run FOLDER` compiles
all rungs into a folder, and `LoadedRung` takes its files from there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.kernels.cuda.compile import cubin
from ridgeline.kernels.gemm.ladder.rungs import RUNGS, Rung

BOX = 64  # numbers of 16 bits in a row of a box
STATIC_LIMIT = 48 << 10  # bytes of dynamic shared memory that a kernel may have without asking


class LoadedRung:
    """A rung on the current CUDA device.

    folder: where its cubin lies; without one it is compiled. Raises NoCudaCompiler and CudaError.
    """

    def __init__(self, rung: Rung, folder: Path | None = None) -> None:
        from cuda.core import Device, ObjectCode

        self.rung = rung
        self._device = Device(torch.cuda.current_device())
        self._device.set_current()
        self._multiprocessors = torch.cuda.get_device_properties(self._device.device_id).multi_processor_count
        code = (folder / f"{rung.name}.cubin").read_bytes() if folder else cubin(rung.source, rung.arch, rung.defines)
        self._kernel = ObjectCode.from_cubin(code).get_kernel("gemm")
        if rung.shared > STATIC_LIMIT:
            self._ask_for_memory()

    def __call__(self, a_MK: Tensor, b_NK: Tensor, c_MN: Tensor) -> None:
        """Write A · Bᵀ to C, on torch's current stream. All three are contiguous, on the rung's device."""
        from cuda.core import LaunchConfig, launch

        (m, k), n = a_MK.shape, len(b_NK)
        config = LaunchConfig(
            grid=self.rung.grid(m, n, self._multiprocessors), block=(*self.rung.block, 1), shmem_size=self.rung.shared
        )  # fmt: skip
        sizes = (np.int32(m), np.int32(n), np.int32(k))
        launch(_CurrentStream(), config, self._kernel, *self._operands(a_MK, b_NK), np.uint64(c_MN.data_ptr()), *sizes)

    def _operands(self, a_MK: Tensor, b_NK: Tensor) -> tuple[Any, Any]:
        if self.rung.boxes is None:
            return np.uint64(a_MK.data_ptr()), np.uint64(b_NK.data_ptr())
        return tuple(_map(x, rows) for x, rows in zip((a_MK, b_NK), self.rung.boxes, strict=True))

    def _ask_for_memory(self) -> None:
        from cuda.bindings import driver

        wanted = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = driver.CUdevice(self._device.device_id)
        (status,) = driver.cuKernelSetAttribute(wanted, self.rung.shared, self._kernel.handle, device)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{self.rung.name}: {self.rung.shared} bytes of shared memory were refused: {status}.")


def _map(x: Tensor, rows: int) -> Any:
    """Return the map by which TMA reads a matrix of 16-bit numbers in boxes of `rows` times 128 bytes."""
    from cuda.core import _tensor_map  # the names of swizzles are nowhere else
    from cuda.core.utils import StridedMemoryView

    view = StridedMemoryView.from_any_interface(x.view(torch.uint16), stream_ptr=-1)  # its bits: no number is computed
    return view.as_tensor_map(box_dim=(rows, BOX), swizzle=_tensor_map.TensorMapSwizzle.SWIZZLE_128B)


class _CurrentStream:
    """torch's current stream, as cuda-core takes it."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, torch.cuda.current_stream().cuda_stream


def runs_here(rung: Rung) -> bool:
    """Return True if the current CUDA device runs the rung's machine code."""
    here = torch.cuda.get_device_capability()
    wanted = rung.arch.removeprefix("sm_")
    return here == (9, 0) if wanted == "90a" else here[0] == int(wanted) // 10


def main(folder: Path) -> None:
    """Compile all rungs into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for rung in RUNGS:
        (folder / f"{rung.name}.cubin").write_bytes(cubin(rung.source, rung.arch, rung.defines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
