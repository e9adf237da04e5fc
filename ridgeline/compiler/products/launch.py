"""Launches a product's machine code by the CUDA driver alone: what was compiled elsewhere runs without a compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ridgeline.compiler.products.hopper import HopperKernel
from ridgeline.compiler.products.matrices import matrix_shapes
from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.cuda.driver import CudaDriver, Kernel, tensor_map


@dataclass(frozen=True)
class ProductLaunch:
    """The launch of a product's kernel, without its text.

    m, n, k: sizes. left_by_k, right_by_k: whether a matrix's rows are along K. dtype: of the result, as torch names it.
    The rest is as HopperKernel has it.
    """

    m: int
    n: int
    k: int
    left_by_k: bool
    right_by_k: bool
    dtype: str
    grid: int
    threads: int
    shared: int
    cluster: int
    boxes: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls, sizes: tuple[int, int, int], by_k: tuple[bool, bool], dtype: str, kernel: HopperKernel
    ) -> ProductLaunch:
        launch = (kernel.grid, kernel.threads, kernel.shared, kernel.cluster)
        return cls(*sizes, *by_k, dtype, *launch, boxes=kernel.boxes)

    @classmethod
    def read(cls, record: dict[str, Any]) -> ProductLaunch:
        return cls(**{**record, "boxes": tuple(map(tuple, record["boxes"]))})

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def fault(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> str:
        """Return "", or why these tensors cannot be given to the kernel."""
        matrices = matrix_shapes((self.m, self.n, self.k), (self.left_by_k, self.right_by_k))
        shapes = *matrices, (self.m, self.n)
        for each, shape in zip((left, right, out), shapes, strict=True):
            if tuple(each.shape) != shape or not each.is_contiguous():
                return f"a matrix is {tuple(each.shape)} with strides {each.stride()}, and not {shape} row by row."
            if each.data_ptr() % 16 or shape[1] * each.itemsize % 16:
                return f"rows of {shape[1]} numbers at {each.data_ptr():#x} do not begin at multiples of 16 bytes."
        if left.dtype != torch.bfloat16 or right.dtype != torch.bfloat16 or out.dtype != getattr(torch, self.dtype):
            return f"the kernel takes bfloat16 and makes {self.dtype}."
        return ""


class LoadedProduct:
    """A product on a device. Raises DriverError where the device refuses its code."""

    def __init__(self, driver: CudaDriver, code: bytes, launch: ProductLaunch, device: int) -> None:
        self.launch, self._driver = launch, driver
        self._kernel = Kernel(driver, code, "product", device=device, shared=launch.shared, cluster=launch.cluster)

    def bound(
        self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, extra: Sequence[torch.Tensor] = ()
    ) -> Callable[[], None]:
        """Return a call that multiplies these tensors into `out` on torch's current stream, whatever number of times.

        Raises InvalidConfig for tensors that the kernel cannot take."""
        launch = self.launch
        if why := launch.fault(left, right, out):
            raise InvalidConfig(f"the product cannot run: {why}")
        maps: list[Any] = [
            tensor_map(self._driver, (each.data_ptr(), *each.shape), each.itemsize, box)
            for each, box in zip((left, right, out), launch.boxes, strict=False)
        ]
        places = [*([out] if len(maps) == 2 else []), *extra]
        arguments = [*maps, *(ctypes.c_void_p(each.data_ptr()) for each in places)]
        grid, block, held = (launch.grid, 1, 1), (launch.threads, 1, 1), (left, right, out, *extra)

        def call(held: object = held) -> None:  # the tensors live as long as the call
            self._kernel.launch(grid, block, torch.cuda.current_stream().cuda_stream, arguments)

        return call
