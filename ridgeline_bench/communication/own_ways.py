"""Our own collectives, over peer memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline_bench.communication.cases import EPS, WIDTH
from ridgeline_bench.communication.room import Room, Trial, Unavailable, rows_to_norm


def all_reduce(room: Room, count: int) -> Trial:
    x_N = room.zeros(count)
    if not room.ours.fits(x_N):
        raise Unavailable("serves small messages only")
    return Trial(x_N, lambda: room.ours.all_reduce(x_N))


def all_reduce_norm(room: Room, count: int) -> Trial:
    weight_M, residual_TM = rows_to_norm(room, count)
    x_TM = room.zeros(count).view(residual_TM.shape)
    if not room.ours.fits_rows(x_TM):
        raise Unavailable("serves few rows only")
    return Trial(x_TM.view(-1), lambda: room.ours.all_reduce_norm(x_TM, residual_TM, weight_M, EPS)[0])


def all_reduce_in_two_shots(room: Room, count: int) -> Trial:
    """A reduce-scatter and an all-gather in one launch."""
    x_N, memory = room.zeros(count), room.ours.memory
    from ridgeline.kernels.ranks.all_reduce import direct  # it needs Triton

    if not direct.fits(x_N, room.size, shots=2):
        raise Unavailable("serves messages of up to some MiB only")
    return Trial(x_N, lambda: direct.all_reduce(x_N, memory, shots=2))


def all_gather(room: Room, count: int) -> Trial:
    x_N = room.zeros(count // room.size)
    if not room.ours.fits_gather(x_N):
        raise Unavailable("serves small messages only")
    return Trial(x_N, lambda: room.ours.all_gather(x_N))


def exchange(room: Room, count: int) -> Trial:
    """Dispatch and combine, as for experts: each rank sends an equal part of its tokens to every rank, and gets them
    back."""
    width = min(WIDTH, count // room.size)
    tokens = count // width
    part, x_TM = tokens // room.size, room.zeros(count).view(tokens, width)
    rank_TK = (torch.arange(tokens, device=room.device) // part).int()[:, None]
    weight_TK = torch.ones(tokens, 1, device=room.device)
    ours = room.exchange(tokens, width)
    ours.capacity = tokens
    arrived: list[Tensor] = []

    def call() -> Tensor:
        came = ours.dispatch(x_TM, rank_TK, weight_TK, 1)
        arrived[:] = [came.x_NM]
        return ours.combine(came.x_NM, came)

    def beside() -> Tensor:
        return arrived[0].view(room.size, tokens, width)[:, room.rank * part : (room.rank + 1) * part]

    return Trial(x_TM.view(-1), call, beside)
