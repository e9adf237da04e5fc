"""Collectives over the symmetric memory of torch, without multicast, and over NVSHMEM through its ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ridgeline_bench.communication.room import Room, Trial, Unavailable


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
    """Copies of this rank's part out of all ranks' memory by copy engines, and the sum of the copies."""
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
    """A put with a signal behind it. It lands at the same address of the other rank: so neighbours send from two
    buffers in turn."""
    meet, (x_N, y_N) = Signals(room), _in_turn(room, count)

    def call() -> Tensor:
        meet(x_N)
        return y_N

    return Trial(x_N, call)


def nvshmem_get(room: Room, count: int) -> Trial:
    """A get reads the same address of the other rank, likewise in turn, once a signal has said that it may."""
    get = _nvshmem("nvshmem_get")
    meet, (x_N, y_N), (word_1, _) = Signals(room), _in_turn(room, count), _shared(room, 1)

    def call() -> Tensor:
        meet(word_1)
        get(y_N, (room.rank - 1) % room.size)
        return y_N

    return Trial(x_N, call)


class Signals:
    """Messages to the next rank, each of which waits for the one from the rank before.

    (The handle's barrier does nothing over NVSHMEM before torch 2.14.) Calls use PADS signals in turn, each set to 1
    and to 2 alternately, so that none is mistaken for the one before it. With at most that many ranks, none is set
    again before it was seen; and a graph of a multiple of 2 · PADS calls can be replayed.
    """

    PADS = 20

    def __init__(self, room: Room) -> None:
        self._put, self._wait = _nvshmem("nvshmem_put_with_signal"), _nvshmem("nvshmem_wait_for_signal")
        if room.size > self.PADS:
            raise Unavailable(f"is measured between at most {self.PADS} ranks")
        self._pads_P, _ = _shared(room, self.PADS, torch.int64)
        self._to, self._source, self._calls = (room.rank + 1) % room.size, (room.rank - 1) % room.size, 0

    def __call__(self, x_N: Tensor) -> None:
        """Write x into the next rank's memory, and wait until the rank before has done so here."""
        turn, pad = divmod(self._calls, self.PADS)
        pad_1, value = self._pads_P[pad : pad + 1], 1 + turn % 2
        self._put(x_N, pad_1, value, self._to)
        self._wait(pad_1, value, self._source)
        self._calls += 1


def _in_turn(room: Room, count: int) -> tuple[Tensor, Tensor]:
    """Return this rank's send and receive buffers. Its neighbours have the same addresses the other way round."""
    if room.size % 2:
        raise Unavailable("is measured between an even number of ranks")
    slots = [_shared(room, count)[0] for _ in range(2)]
    return slots[room.rank % 2], slots[(room.rank + 1) % 2]


def _shared(room: Room, count: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Any]:
    """Return shared memory that is never given back: NVSHMEM's allocator remembers handles by address (before torch
    2.14), so memory that takes the place of other would be sent to with the handle of that."""
    shared = room.shared(count, dtype)
    room.kept.append(shared[0])
    return shared


def nvshmem_all_to_all(room: Room, count: int) -> Trial:
    exchange = _nvshmem("nvshmem_all_to_all")
    (x_N, _), (y_N, _) = _shared(room, count), _shared(room, count)

    def call() -> Tensor:
        exchange(x_N, y_N, room.group)
        return y_N

    return Trial(x_N, call)
