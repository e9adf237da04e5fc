"""A GPU that is not there, for the host's part of micros: memory of the CPU, and kernels as functions of Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch.overrides import TorchFunctionMode

Answer = Callable[[Sequence[int], Sequence[Any]], None]  # the grid and the arguments of a launch


class OnTheCpu(TorchFunctionMode):
    """Tensors that are asked for on a GPU are on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class FakeKernel:
    """A kernel that answers by a function, and that has so many registers and blocks."""

    def __init__(self, answer: Answer, resident: Callable[[int, int], int] = lambda threads, shared: 0) -> None:
        self.answer, self.resident = answer, resident

    def launch(
        self, grid: Sequence[int], block: Sequence[int], stream: int, arguments: Sequence[Any], **_: Any
    ) -> None:
        self.answer(grid, arguments)

    def attribute(self, which: int) -> int:
        return {1: 0, 4: 32}[which]


def fill(arguments: Sequence[Any], entry: int, *numbers: int) -> None:
    """Write an entry of the answer."""
    memory = (ctypes.c_longlong * 4).from_address(arguments[0].value + 32 * entry)
    memory[:] = [n if n < 2**63 else n - 2**64 for n in numbers]


def absent_gpu(kernel: Any, seconds: float = 1e-6, multiprocessors: int = 132) -> ExitStack:
    """Enter a GPU of some multiprocessors on which every kernel is this one, and takes so long."""
    stack, cuda = ExitStack(), torch.cuda
    event = SimpleNamespace(
        record=lambda stream: None, synchronize=lambda: None, elapsed_time=lambda end: 1e3 * seconds
    )
    for owner, name, value in (
        (cuda, "current_device", lambda: 0), (cuda, "_sleep", lambda cycles: None), (cuda, "synchronize", lambda: None),
        (cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=multiprocessors)),
        (cuda, "get_device_capability", lambda: (9, 0)), (cuda, "Event", lambda **_: event),
        (cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0)), (cuda, "Stream", MagicMock()),
        (cuda, "device", MagicMock()), (cuda, "CUDAGraph", MagicMock()), (cuda, "graph", MagicMock()),
        (cuda, "stream", MagicMock()),
    ):  # fmt: skip
        stack.enter_context(patch.object(owner, name, value))
    stack.enter_context(patch("ridgeline.kernels.micro.run.Kernel", lambda *_, **__: kernel))
    stack.enter_context(patch("ridgeline.kernels.micro.run.CudaDriver", MagicMock()))
    stack.enter_context(patch("ridgeline.kernels.micro.run.code_of", lambda *_: b""))
    stack.enter_context(OnTheCpu())
    return stack
