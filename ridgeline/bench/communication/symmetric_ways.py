"""Collectives over the symmetric memory of torch, without multicast, and over NVSHMEM through its ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ridgeline.bench.communication.room import Room, Trial, Unavailable


def one_shot(room: Room, count: int) -> Trial:
    x_N, _ = room.shared(count)
    op = _op("one_shot_all_reduce")
    return Trial(x_N, lambda: op(x_N, "sum", room.group))


def two_shot(room: Room, count: int) -> Trial:
    x_N, _ = room.shared(count)
    op = _op("two_shot_all_reduce_")
    return Trial(x_N, lambda: op(x_N, "sum", room.group))


def reduce_scatter(room: Room, count: int) -> Trial:
    """The first of the two shots."""
    (x_N, _), part_N = room.shared(count), room.zeros(count // room.size)
    op = _op("reduce_scatter_out")
    return Trial(x_N, lambda: op(x_N, room.group, False, part_N))


def copied_all_gather(room: Room, count: int) -> Trial:
    """Copies out of all ranks' memory by copy engines, in a stream of torch's."""
    x_N, _ = room.shared(count // room.size)
    op = _op("_low_contention_all_gather")
    return Trial(x_N, lambda: _waited(op(x_N, room.group)))


def copied_reduce_scatter(room: Room, count: int) -> Trial:
    """Such copies of this rank's part, and a sum of what came."""
    x_N, _ = room.shared(count)
    op = _op("_low_contention_reduce_scatter")
    return Trial(x_N, lambda: _waited(op(x_N, "sum", room.group)))


def _waited(x: Tensor) -> Tensor:
    done: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return done


def _op(name: str) -> Callable[..., Tensor]:
    if not hasattr(torch.ops.symm_mem, name):
        raise Unavailable(f"torch {torch.__version__} has no {name}")
    found: Callable[..., Tensor] = getattr(torch.ops.symm_mem, name)
    return found


def put(room: Room, count: int) -> Trial:
    """Write into the next rank's memory, between two barriers of the handle."""
    x_N, (inbox_N, handle) = room.zeros(count), room.shared(count)
    there_N = handle.get_buffer((room.rank + 1) % room.size, (count,), room.dtype)

    def call() -> Tensor:
        there_N.copy_(x_N)
        handle.barrier()
        return inbox_N

    return Trial(x_N, call)


def get(room: Room, count: int) -> Trial:
    """Read the memory of the rank before, after a barrier of the handle."""
    (x_N, handle), y_N = room.shared(count), room.zeros(count)
    there_N = handle.get_buffer((room.rank - 1) % room.size, (count,), room.dtype)

    def call() -> Tensor:
        handle.barrier()
        return y_N.copy_(there_N)

    return Trial(x_N, call)


# ---- NVSHMEM, through torch's ops -----------------------------------------------------------------------------------


def _nvshmem(op: str) -> Callable[..., Any]:
    import torch.distributed._symmetric_memory as symmetric

    there = getattr(symmetric, "is_nvshmem_available", None)
    if there is None or not there() or not hasattr(torch.ops.symm_mem, op):
        raise Unavailable("this torch has no NVSHMEM, or its libraries are not installed")
    symmetric.set_backend("NVSHMEM")  # before any shared memory is made, so these ways have processes of their own
    found: Callable[..., Any] = getattr(torch.ops.symm_mem, op)
    return found


def nvshmem_put(room: Room, count: int) -> Trial:
    """A put lands at the same address of the other rank: so neighbours send from two buffers in turn."""
    put = _nvshmem("nvshmem_put")
    x_N, y_N, handle = _in_turn(room, count)

    def call() -> Tensor:
        put(x_N, (room.rank + 1) % room.size)
        handle.barrier()
        return y_N

    return Trial(x_N, call)


def nvshmem_get(room: Room, count: int) -> Trial:
    """A get reads the same address of the other rank, likewise in turn."""
    get = _nvshmem("nvshmem_get")
    x_N, y_N, handle = _in_turn(room, count)

    def call() -> Tensor:
        handle.barrier()
        get(y_N, (room.rank - 1) % room.size)
        return y_N

    return Trial(x_N, call)


def _in_turn(room: Room, count: int) -> tuple[Tensor, Tensor, Any]:
    """Return what this rank sends, where it receives, and the handle of the latter: the addresses of which are those of
    its neighbours the other way round."""
    if room.size % 2:
        raise Unavailable("is measured between an even number of ranks")
    slots = [room.shared(count) for _ in range(2)]
    return slots[room.rank % 2][0], *slots[(room.rank + 1) % 2]


def nvshmem_all_to_all(room: Room, count: int) -> Trial:
    exchange = _nvshmem("nvshmem_all_to_all")
    (x_N, _), (y_N, _) = room.shared(count), room.shared(count)

    def call() -> Tensor:
        exchange(x_N, y_N, room.group)
        return y_N

    return Trial(x_N, call)
