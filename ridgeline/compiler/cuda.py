"""Kernels on NVIDIA's GPUs: PTX from the store or from the compiler, loaded by the CUDA driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from ridgeline.compiler.mapping import GpuText
from ridgeline.kernels.cuda.driver import CudaDriver, Kernel

ALIGNMENT = 16  # bytes at which the first number of a tensor lies, so that vectors can be loaded
MOST_COUNT = (1 << 31) - 1  # rows or vectors of a launch


@cache
def cuda_driver() -> CudaDriver:
    return CudaDriver()


class CudaCode:
    """PTX or a cubin with a kernel `entry`, loaded on a device when it is first launched there.

    threads: of a block. shared: bytes of dynamic shared memory.
    """

    def __init__(self, code: bytes, threads: int, *, entry: str = "kernel", shared: int = 0) -> None:
        self._code = code if code.endswith(b"\0") else code + b"\0"
        self._entry, self._shared = entry, shared
        self._block = (threads, 1, 1)
        self._kernels: dict[int, Kernel] = {}

    def kernel(self, device: int) -> Kernel:
        """Return the kernel on a device, whose context is current. Raise DriverError."""
        if device not in self._kernels:
            self._kernels[device] = Kernel(cuda_driver(), self._code, self._entry, device=device, shared=self._shared)
        return self._kernels[device]

    def launch(self, grid: Sequence[int], arguments: Sequence[Any], device: int) -> None:
        """Launch on the current stream of a device."""
        stream = torch.cuda.current_stream(device).cuda_stream
        self.kernel(device).launch((*grid, *(1,) * (3 - len(grid))), self._block, stream, arguments)


class CudaKernel:
    """A fused node's kernel. Its call fills the outputs."""

    def __init__(self, text: GpuText, code: CudaCode) -> None:
        self.text, self.code = text, code
        self._grid = (text.blocks,)
        self._count = ctypes.c_int32(text.count)

    def __call__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """inputs, outputs: dense, of the shapes that the kernel was made for."""
        held = [each if each.data_ptr() % ALIGNMENT == 0 else each.clone() for each in inputs]
        device = outputs[0].get_device()
        pointers = [ctypes.c_void_p(each.data_ptr()) for each in (*held, *outputs)]
        with torch.cuda.device(device):
            self.code.launch(self._grid, (*pointers, self._count), device)
