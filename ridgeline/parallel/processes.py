"""Ranks that are processes, joined by torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.kernels.ops import Ops

if TYPE_CHECKING:
    from ridgeline.parallel.peer_memory import PeerSums

LOADING = timedelta(hours=2)  # ranks that die meanwhile are noticed otherwise

logger = logging.getLogger(__name__)
A = TypeVar("A", bound="ProcessAxis")


class ProcessAxis:
    """An axis over all processes of the group that `join` made, or over some of them.

    Sums are made in the order of the ranks, in float32, and rounded once: so they are the same on every rank, and an
    element's does not depend on the tensor around it. Large ones on GPUs are NCCL's, where rings begin the sum of an
    element at a rank that follows from the element's place; with two ranks that is the same sum.

    members, group: the numbers of the processes among all, and torch's group of them. None: all processes.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        store: Any,
        members: Sequence[int] | None = None,
        group: Any = None,
    ) -> None:
        self.rank, self.size, self._device, self._store, self._asked = rank, size, device, store, 0
        self._members, self._group = list(members or range(size)), group
        alone = device.type != "cuda" or members is not None  # peers of a part of the processes are not written yet
        self._sums = None if alone else _peer_sums(rank, size, device)

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._sums is not None and self._sums.fits(x):
            return self._sums.all_reduce(x)
        if x.is_cuda:
            dist.all_reduce(x, group=self._group)
            return x
        return _sum(self._all(x))

    def begin_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin what `all_reduce` does, and return a function that waits for the sum and returns it. x may not change
        before."""
        if self._sums is not None and self._sums.fits(x):
            done = self._sums.all_reduce(x)
            return lambda: done
        if x.is_cuda:
            return _awaited(dist.all_reduce(x, group=self._group, async_op=True), x)
        arrived = self._begin_all(x)
        return lambda: _sum(arrived())

    def all_reduce_norm(
        self, x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        # Deterministic: a launch that also normalizes adds squares in its own order, and the tokens choose the launch
        sums = None if ops.deterministic else self._sums
        if sums is not None and sums.fits_rows(x_TM):
            return sums.all_reduce_norm(x_TM, residual_TM, weight_M, eps)
        return ops.rms_norm(self.all_reduce(x_TM), residual_TM, weight_M, eps)

    def all_gather(self, x: Tensor) -> Tensor:
        if self._sums is not None and self._sums.fits_gather(x):
            return self._sums.all_gather(x)
        if not x.is_cuda:
            return torch.cat(self._all(x), -1)
        parts = x.new_empty(self.size, *x.shape)
        dist.all_gather_into_tensor(parts, x.contiguous(), group=self._group)
        return parts.movedim(0, -2).flatten(-2)

    def reduce_scatter(self, x_TM: Tensor) -> Tensor:
        if x_TM.is_cuda:
            part_TM = x_TM.new_empty(len(x_TM) // self.size, *x_TM.shape[1:])
            dist.reduce_scatter_tensor(part_TM, x_TM.contiguous(), group=self._group)
            return part_TM
        return self.all_reduce(x_TM).chunk(self.size)[self.rank]

    def begin_reduce_scatter(self, x_TM: Tensor) -> Callable[[], Tensor]:
        """Begin what `reduce_scatter` does, and return a function that waits for this rank's share."""
        if not x_TM.is_cuda:
            total = self.begin_all_reduce(x_TM)
            return lambda: total().chunk(self.size)[self.rank]
        part_TM, x_TM = x_TM.new_empty(len(x_TM) // self.size, *x_TM.shape[1:]), x_TM.contiguous()
        return _awaited(dist.reduce_scatter_tensor(part_TM, x_TM, group=self._group, async_op=True), part_TM, x_TM)

    def gather_rows(self, x_TM: Tensor) -> Tensor:
        if not x_TM.is_cuda:
            return torch.cat(self._all(x_TM))
        whole_TM = x_TM.new_empty(self.size * len(x_TM), *x_TM.shape[1:])
        dist.all_gather_into_tensor(whole_TM, x_TM.contiguous(), group=self._group)
        return whole_TM

    def begin_gather_rows(self, x_TM: Tensor) -> Callable[[], Tensor]:
        """Begin what `gather_rows` does, and return a function that waits for all rows."""
        if not x_TM.is_cuda:
            arrived = self._begin_all(x_TM)
            return lambda: torch.cat(arrived())
        whole_TM, x_TM = x_TM.new_empty(self.size * len(x_TM), *x_TM.shape[1:]), x_TM.contiguous()
        return _awaited(dist.all_gather_into_tensor(whole_TM, x_TM, group=self._group, async_op=True), whole_TM, x_TM)

    def all_to_all(self, x: Tensor) -> Tensor:
        """Send entry r of the first dimension to rank r. Return a tensor whose entry r came from rank r."""
        return self.begin_all_to_all(x)()

    def begin_all_to_all(self, x: Tensor) -> Callable[[], Tensor]:
        """Send as `all_to_all` does, and return a function that waits for what comes and returns it."""
        sent, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        return _awaited(dist.all_to_all_single(received, sent, group=self._group, async_op=True), received, sent)

    def swap_rows(self, x_NB: Tensor, sent: Sequence[int], came: Sequence[int]) -> Tensor:
        """Send the next `sent[r]` rows to each rank r. Return the `came[r]` rows of each, in the order of ranks."""
        came_NB = x_NB.new_empty(sum(came), *x_NB.shape[1:])
        dist.all_to_all_single(came_NB, x_NB.contiguous(), list(came), list(sent), group=self._group)
        return came_NB

    def smallest(self, value: int) -> int:
        # Not by a collective: ranks come here when they have loaded, which may take one much longer than others
        self._asked += 1
        question = f"smallest {self._members} {self._asked}"
        self._store.set(f"{question} {self.rank}", str(value))
        names = [f"{question} {rank}" for rank in range(self.size)]
        self._store.wait(names, LOADING)
        return min(int(self._store.get(name)) for name in names)

    def _all(self, x: Tensor) -> list[Tensor]:
        mine = x.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self._group)
        return parts

    def _begin_all(self, x: Tensor) -> Callable[[], list[Tensor]]:
        mine = x.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        work = dist.all_gather(parts, mine, group=self._group, async_op=True)
        assert work is not None

        def arrived(_alive: Tensor = mine) -> list[Tensor]:  # what is sent lives until all of it was
            work.wait()
            return parts

        return arrived

    def divided(self, kind: type[A], parts: Iterable[Sequence[int]], limit: float) -> A:
        """Return this process's axis over that part of the processes in which it is. All of them call it with the same
        parts. limit: seconds after which a collective there fails."""
        found: A | None = None
        for members in parts:
            every = len(members) == self.size
            group = None if every else dist.new_group(list(members), timeout=timedelta(seconds=limit))
            if self.rank in members:
                found = kind(members.index(self.rank), len(members), self._device, self._store, members, group)
        assert found is not None
        return found


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum in the order of ranks, in float32 and rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def _awaited(work: dist.Work | None, received: Tensor, *sent: Tensor) -> Callable[[], Tensor]:
    """Return a function that waits for a collective and returns what it received. What is sent lives until then."""
    assert work is not None

    def came(_alive: tuple[Tensor, ...] = sent) -> Tensor:
        work.wait()
        return received

    return came


def grid(size: int, inner: int) -> tuple[list[range], list[range]]:
    """Return so many numbers as rows of `inner` consecutive ones, and as the columns of these rows."""
    rows = [range(first, first + inner) for first in range(0, size, inner)]
    return rows, [range(first, size, inner) for first in range(inner)]


def _peer_sums(rank: int, size: int, device: torch.device) -> PeerSums | None:
    """Return the sums of GPUs that can write to each other, or None, with a line in the log."""
    from ridgeline.parallel.peer_memory import PeerSums  # here, because it needs Triton and a build for GPUs

    try:
        return PeerSums(rank, size, device)
    except RuntimeError as error:
        logger.warning("GPUs cannot write to each other (%s); all sums over ranks are NCCL's", error)
        return None


def join(
    rank: int,
    size: int,
    meeting: Path,
    device: torch.device,
    limit: float,
    *,
    adds_up: bool = True,
    through_host: bool = False,
) -> ProcessAxis:
    """Meet the other processes, and return their axis. Every process calls it once.

    meeting: a file that does not exist yet, on a disk that all of them see.
    limit: seconds after which a collective gives up on ranks that do not take part, with an error.
    adds_up: sums are made over all of them.
    through_host: some are on a CPU and some on GPUs, so what they say to each other passes through the host's memory.
    """
    backend = "nccl" if device.type == "cuda" and not through_host else "gloo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on this machine, whatever its name resolves to
    store = dist.FileStore(str(meeting), size)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=limit),
        device_id=device if backend == "nccl" else None,
    )
    return ProcessAxis(rank, size, device, store, None if adds_up else range(size))
