"""The ways in which ranks can do a collective. A way is a function that makes a trial; a new one is a line in WAYS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.bench.communication.cases import EPS, WIDTH
from ridgeline.kernels.op import Platform
from ridgeline.kernels.ops import Ops


class Unavailable(Exception):
    """Raised where a way does not exist, with the reason."""


class Trial(NamedTuple):
    """A collective that is ready to run. input: where the rank's numbers go. call: runs it and returns the result."""

    input: Tensor
    call: Callable[[], Tensor]


@dataclass(frozen=True)
class Room:
    """A rank among others."""

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype

    def zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=self.dtype, device=self.device)

    @cached_property
    def ours(self) -> Any:
        """Our small sums over peer memory."""
        if self.device.type != "cuda":
            raise Unavailable("needs GPUs")
        from ridgeline.parallel.peer_memory import PeerSums  # it needs Triton and a build for GPUs

        return PeerSums(self.rank, self.size, self.device)

    def shared(self, count: int) -> tuple[Tensor, Any]:
        """Return memory that the other ranks can write to, and its handle."""
        if self.device.type != "cuda":
            raise Unavailable("needs GPUs")
        import torch.distributed._symmetric_memory as symmetric

        x_N = symmetric.empty(count, dtype=self.dtype, device=self.device).zero_()
        torch.cuda.synchronize(self.device)
        return x_N, symmetric.rendezvous(x_N, self.group)

    @property
    def group(self) -> Any:
        """The name of the group of all ranks."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD.group_name


Way = Callable[[Room, int], Trial]


# ---- torch.distributed: NCCL on GPUs, gloo on CPUs ------------------------------------------------------------------


def all_reduce(room: Room, count: int) -> Trial:
    x_N = room.zeros(count)

    def call() -> Tensor:
        dist.all_reduce(x_N)
        return x_N

    return Trial(x_N, call)


def all_gather(room: Room, count: int) -> Trial:
    x_N, all_N = room.zeros(count // room.size), room.zeros(count)

    def call() -> Tensor:
        dist.all_gather_into_tensor(all_N, x_N)
        return all_N

    return Trial(x_N, call)


def reduce_scatter(room: Room, count: int) -> Trial:
    x_N, part_N = room.zeros(count), room.zeros(count // room.size)

    def call() -> Tensor:
        dist.reduce_scatter_tensor(part_N, x_N)
        return part_N

    return Trial(x_N, call)


def all_to_all(room: Room, count: int) -> Trial:
    x_N, y_N = room.zeros(count), room.zeros(count)

    def call() -> Tensor:
        dist.all_to_all_single(y_N, x_N)
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


def all_reduce_then_norm(room: Room, count: int) -> Trial:
    """The library's sum, and our kernel for the norm."""
    sums, (weight_M, residual_TM), ops = all_reduce(room, count), _norm(room, count), Ops(Platform.of(room.device))

    def call() -> Tensor:
        return ops.rms_norm(sums.call().view(residual_TM.shape), residual_TM, weight_M, EPS)[0]

    return Trial(sums.input, call)


def _norm(room: Room, count: int) -> tuple[Tensor, Tensor]:
    """Return weights of one and residuals of zero, [M] and [T, M]."""
    width = min(WIDTH, count)
    return torch.ones(width, dtype=room.dtype, device=room.device), room.zeros(count // width * width).view(-1, width)


# ---- our own --------------------------------------------------------------------------------------------------------


def our_sum(room: Room, count: int) -> Trial:
    x_N = room.zeros(count)
    if not room.ours.fits(x_N):
        raise Unavailable("serves small messages only")
    return Trial(x_N, lambda: room.ours.all_reduce(x_N))


def our_sum_and_norm(room: Room, count: int) -> Trial:
    weight_M, residual_TM = _norm(room, count)
    x_TM = room.zeros(count).view(residual_TM.shape)
    if not room.ours.fits_rows(x_TM):
        raise Unavailable("serves few rows only")
    return Trial(x_TM.view(-1), lambda: room.ours.all_reduce_norm(x_TM, residual_TM, weight_M, EPS)[0])


# ---- torch's symmetric memory; no multicast -------------------------------------------------------------------------


def symmetric_one_shot(room: Room, count: int) -> Trial:
    x_N, _ = room.shared(count)
    return Trial(x_N, lambda: torch.ops.symm_mem.one_shot_all_reduce(x_N, "sum", room.group))


def symmetric_two_shot(room: Room, count: int) -> Trial:
    x_N, _ = room.shared(count)
    return Trial(x_N, lambda: torch.ops.symm_mem.two_shot_all_reduce_(x_N, "sum", room.group))


def symmetric_put(room: Room, count: int) -> Trial:
    """Write into the next rank's memory, between two barriers of the handle."""
    x_N, (inbox_N, handle) = room.zeros(count), room.shared(count)
    there_N = handle.get_buffer((room.rank + 1) % room.size, (count,), room.dtype)

    def call() -> Tensor:
        there_N.copy_(x_N)
        handle.barrier()
        return inbox_N

    return Trial(x_N, call)


def symmetric_get(room: Room, count: int) -> Trial:
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
    if room.size % 2:
        raise Unavailable("is measured between an even number of ranks")
    slots = [room.shared(count) for _ in range(2)]
    x_N, (y_N, handle) = slots[room.rank % 2][0], slots[(room.rank + 1) % 2]

    def call() -> Tensor:
        put(x_N, (room.rank + 1) % room.size)
        handle.barrier()
        return y_N

    return Trial(x_N, call)


def nvshmem_all_to_all(room: Room, count: int) -> Trial:
    exchange = _nvshmem("nvshmem_all_to_all")
    (x_N, _), (y_N, _) = room.shared(count), room.shared(count)

    def call() -> Tensor:
        exchange(x_N, y_N, room.group)
        return y_N

    return Trial(x_N, call)


# ---- copies between two GPUs, by one process ------------------------------------------------------------------------


def copy_to_peer(room: Room, count: int) -> Trial:
    x_N, there = room.zeros(count), _second(room)
    y_N = torch.zeros(count, dtype=room.dtype, device=there) if room.rank == 0 else x_N

    def call() -> Tensor:
        return y_N.copy_(x_N) if room.rank == 0 else x_N  # the others look on

    return Trial(x_N, call)


def copy_through_host(room: Room, count: int) -> Trial:
    """Down to pinned memory of the host and up again, over PCIe."""
    x_N, there = room.zeros(count), _second(room)
    if room.rank != 0:
        return Trial(x_N, lambda: x_N)
    host_N = torch.zeros(count, dtype=room.dtype).pin_memory()
    y_N = torch.zeros(count, dtype=room.dtype, device=there)

    def call() -> Tensor:
        host_N.copy_(x_N, non_blocking=True)
        torch.cuda.current_stream(there).wait_stream(torch.cuda.current_stream(room.device))
        y_N.copy_(host_N, non_blocking=True)
        torch.cuda.current_stream(room.device).wait_stream(torch.cuda.current_stream(there))
        return y_N

    return Trial(x_N, call)


def _second(room: Room) -> torch.device:
    if room.device.type != "cuda" or room.size < 2:
        raise Unavailable("needs two GPUs")
    return torch.device("cuda", 1)


LIBRARY: Mapping[str, Way] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "send": send,
}
WAYS: Mapping[str, Mapping[str, Way]] = {
    "gloo": LIBRARY,
    "nccl": {**LIBRARY, "all_reduce_norm": all_reduce_then_norm},
    "ours": {"all_reduce": our_sum, "all_reduce_norm": our_sum_and_norm},
    "symmetric-one-shot": {"all_reduce": symmetric_one_shot},
    "symmetric-two-shot": {"all_reduce": symmetric_two_shot},
    "symmetric-put": {"send": symmetric_put},
    "symmetric-get": {"send": symmetric_get},
    "nvshmem": {"send": nvshmem_put, "all_to_all": nvshmem_all_to_all},
    "peer-copy": {"copy": copy_to_peer},
    "host-copy": {"copy": copy_through_host},
}
EAGER = ("peer-copy", "host-copy")  # these go over two devices' streams, which a graph does not hold
