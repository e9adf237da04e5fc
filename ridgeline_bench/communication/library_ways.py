"""Collectives of torch.distributed: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline_bench.communication.cases import EPS
from ridgeline_bench.communication.room import Room, Trial, Unavailable, rows_to_norm


def all_reduce(room: Room, count: int) -> Trial:
    x_N = room.zeros(count)

    def call() -> Tensor:
        dist.all_reduce(x_N)
        return x_N

    return Trial(x_N, call)


def all_gather(room: Room, count: int) -> Trial:
    return _into(dist.all_gather_into_tensor, room.zeros(count), room.zeros(count // room.size))


def reduce_scatter(room: Room, count: int) -> Trial:
    return _into(dist.reduce_scatter_tensor, room.zeros(count // room.size), room.zeros(count))


def all_to_all(room: Room, count: int) -> Trial:
    return _into(dist.all_to_all_single, room.zeros(count), room.zeros(count))


def _into(collective: Callable[[Tensor, Tensor], object], y_N: Tensor, x_N: Tensor) -> Trial:
    """Return the trial of a collective that writes into a tensor of its own."""

    def call() -> Tensor:
        collective(y_N, x_N)
        return y_N

    return Trial(x_N, call)


def send(room: Room, count: int) -> Trial:
    x_N, y_N = room.zeros(count), room.zeros(count)
    after, before = (room.rank + 1) % room.size, (room.rank - 1) % room.size

    def call() -> Tensor:
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x_N, after), dist.P2POp(dist.irecv, y_N, before)])
        for work in works:
            work.wait()
        return y_N

    return Trial(x_N, call)


def exchange(room: Room, count: int) -> Trial:
    """Parts for all ranks, and then the same back."""
    x_N, there_N, back_N = (room.zeros(count) for _ in range(3))

    def call() -> Tensor:
        dist.all_to_all_single(there_N, x_N)
        dist.all_to_all_single(back_N, there_N)
        return back_N

    return Trial(x_N, call, lambda: there_N)


def scatter_gather(room: Room, count: int) -> Trial:
    """A sum of two collectives: each rank adds up a part, and all get all parts."""
    x_N, part_N, y_N = room.zeros(count), room.zeros(count // room.size), room.zeros(count)

    def call() -> Tensor:
        dist.reduce_scatter_tensor(part_N, x_N)
        dist.all_gather_into_tensor(y_N, part_N)
        return y_N

    return Trial(x_N, call)


def two_level(room: Room, count: int) -> Trial:
    """A sum on two levels, as between hosts of two ranks each: a half of the numbers for each rank of a pair, their
    sums over the pairs, and both halves for both. Over the slower links between hosts only halves would travel."""
    if room.size < 4 or room.size % 2:
        raise Unavailable("needs an even number of ranks, and four of them at least")
    pair, across = room.levels
    x_N, half_N, y_N = room.zeros(count), room.zeros(count // 2), room.zeros(count)

    def call() -> Tensor:
        dist.reduce_scatter_tensor(half_N, x_N, group=pair)
        dist.all_reduce(half_N, group=across)
        dist.all_gather_into_tensor(y_N, half_N, group=pair)
        return y_N

    return Trial(x_N, call)


def all_reduce_then_norm(room: Room, count: int) -> Trial:
    """The library's sum, and our kernel for the norm."""
    sums, (weight_M, residual_TM), ops = (
        all_reduce(room, count),
        rows_to_norm(room, count),
        Ops(Platform.of(room.device)),
    )

    def call() -> Tensor:
        return ops.rms_norm(sums.call().view(residual_TM.shape), residual_TM, weight_M, EPS)[0]

    return Trial(sums.input, call)
