"""Ranks that are threads of this process: the layers' logic of several ranks without their processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from ridgeline.kernels.ops import Ops

T = TypeVar("T")
LIMIT = 60  # seconds that a rank waits for the others


@dataclass(frozen=True)
class Here:
    """A `Passing` that has arrived."""

    received: Tensor

    def wait(self) -> Tensor:
        return self.received


class ThreadAxis:
    """An axis whose ranks hand each other tensors through a list."""

    def __init__(self, rank: int, size: int, barrier: Barrier, held: list[list[Tensor] | None]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._held = barrier, held

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x)).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._all(x), -1)

    def reduce_scatter(self, x_TM: Tensor) -> Tensor:
        return self.all_reduce(x_TM).chunk(self.size)[self.rank]

    def gather_rows(self, x_TM: Tensor) -> Tensor:
        return torch.cat(self._all(x_TM))

    def all_reduce_norm(
        self, x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        return ops.rms_norm(self.all_reduce(x_TM), residual_TM, weight_M, eps)

    def all_to_all(self, x: Tensor) -> Tensor:
        return torch.stack([part[self.rank] for part in self._all(x)])

    def begin_all_to_all(self, x: Tensor) -> Callable[[], Tensor]:
        received = self.all_to_all(x)
        return lambda: received

    def swap_rows(self, x_NB: Tensor, sent: Sequence[int], came: Sequence[int]) -> Tensor:
        parts = [part[self.rank] for part in self._handed(list(x_NB.split(list(sent))))]
        assert list(map(len, parts)) == list(came)
        return torch.cat(parts)

    def smallest(self, value: int) -> int:
        return int(torch.stack(self._all(torch.tensor(value))).min())

    def passed_on(self, x: Tensor) -> Here:
        return Here(self._all(x)[self.rank - 1])

    def exchanged(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Empty tensors are exchanged like others, and all must have the shapes that are expected."""
        received = [sent[self.rank] for sent in self._handed(list(parts))]
        assert [tuple(part.shape) for part in received] == [tuple(shape) for shape in shapes]
        return received

    def stacked(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x))

    def give_up(self) -> None:
        """Let no other rank wait for this one."""
        self._barrier.abort()

    def _all(self, x: Tensor) -> list[Tensor]:
        return [part for [part] in self._handed([x])]

    def _handed(self, x: list[Tensor]) -> list[list[Tensor]]:
        """Return the tensors of every rank."""
        self._held[self.rank] = x
        self._barrier.wait(LIMIT)
        parts = [[each.clone() for each in part] for part in self._held if part is not None]
        self._barrier.wait(LIMIT)
        return parts


def axes(size: int) -> list[ThreadAxis]:
    """Return one axis of so many ranks, as each of them sees it."""
    barrier, held = Barrier(size), [None] * size
    return [ThreadAxis(rank, size, barrier, held) for rank in range(size)]  # type: ignore[arg-type]


def on_ranks(size: int, work: Callable[[ThreadAxis], T]) -> list[T]:
    """Do the work on so many ranks, and return what each returned."""
    of_rank = axes(size)
    return in_threads([partial(work, axis) for axis in of_rank], of_rank[0].give_up)


def in_threads(works: Sequence[Callable[[], T]], give_up: Callable[[], None]) -> list[T]:
    """Do all works at once, each in a thread, and return what each returned. give_up: called where one fails, since
    others may wait for it."""

    def thread(work: Callable[[], T]) -> T:
        try:
            return work()
        except BaseException:
            give_up()
            raise

    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(thread, work) for work in works]
        failures = [future.exception() for future in futures]
        for failure in failures:
            if failure is not None and "BrokenBarrier" not in type(failure).__name__:
                raise failure
        return [future.result() for future in futures]
