"""Ranks that are threads of this process: the layers' logic of several ranks without their processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from ridgeline.kernels.ops import Ops

T = TypeVar("T")
LIMIT = 60  # seconds that a rank waits for the others


class ThreadAxis:
    """An axis whose ranks hand each other tensors through a list."""

    def __init__(self, rank: int, size: int, barrier: Barrier, held: list[Tensor | None]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._held = barrier, held

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x)).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._all(x), -1)

    def all_reduce_norm(
        self, x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        return ops.rms_norm(self.all_reduce(x_TM), residual_TM, weight_M, eps)

    def all_to_all(self, x: Tensor) -> Tensor:
        return torch.stack([part[self.rank] for part in self._all(x)])

    def smallest(self, value: int) -> int:
        return int(torch.stack(self._all(torch.tensor(value))).min())

    def _all(self, x: Tensor) -> list[Tensor]:
        self._held[self.rank] = x
        self._barrier.wait(LIMIT)
        parts = [part.clone() for part in self._held if part is not None]
        self._barrier.wait(LIMIT)
        return parts


def on_ranks(size: int, work: Callable[[ThreadAxis], T]) -> list[T]:
    """Do the work on so many ranks, and return what each returned."""
    barrier, held = Barrier(size), [None] * size

    def rank(number: int) -> T:
        try:
            return work(ThreadAxis(number, size, barrier, held))
        except BaseException:
            barrier.abort()  # the others must not wait for this one
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank, number) for number in range(size)]
        failures = [f.exception() for f in futures]
        for failure in failures:
            if failure is not None and "BrokenBarrier" not in type(failure).__name__:
                raise failure
        return [future.result() for future in futures]
