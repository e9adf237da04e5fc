"""The ways in which ranks can do a collective. A way is a function that makes a trial; a new one is a line in WAYS."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ridgeline_bench.communication import library_ways as library
from ridgeline_bench.communication import own_ways as own
from ridgeline_bench.communication import symmetric_ways as symmetric
from ridgeline_bench.communication.room import Room, Trial, Unavailable, Way

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
    "all_reduce": library.all_reduce,
    "all_gather": library.all_gather,
    "reduce_scatter": library.reduce_scatter,
    "all_to_all": library.all_to_all,
    "exchange": library.exchange,
    "send": library.send,
}
WAYS: Mapping[str, Mapping[str, Way]] = {
    "gloo": LIBRARY,
    "nccl": {**LIBRARY, "all_reduce_norm": library.all_reduce_then_norm},
    "scatter-gather": {"all_reduce": library.scatter_gather},
    "two-level": {"all_reduce": library.two_level},
    "ours": {
        "all_reduce": own.all_reduce,
        "all_reduce_norm": own.all_reduce_norm,
        "all_gather": own.all_gather,
        "exchange": own.exchange,
    },
    "ours-two-shot": {"all_reduce": own.all_reduce_in_two_shots},
    "symmetric-one-shot": {"all_reduce": symmetric.one_shot},
    "symmetric-two-shot": {"all_reduce": symmetric.two_shot, "reduce_scatter": symmetric.reduce_scatter},
    "symmetric-copies": {
        "all_gather": symmetric.copied_all_gather,
        "reduce_scatter": symmetric.copied_reduce_scatter,
    },
    "symmetric-put": {"send": symmetric.put},
    "symmetric-get": {"send": symmetric.get},
    "nvshmem": {"send": symmetric.nvshmem_put, "all_to_all": symmetric.nvshmem_all_to_all},
    "nvshmem-get": {"send": symmetric.nvshmem_get},
    "peer-copy": {"copy": copy_to_peer},
    "host-copy": {"copy": copy_through_host},
}
LEAST = {"two-level": 4}  # ranks of a way that needs more than two
EAGER = ("peer-copy", "host-copy")  # these go over two devices' streams, which a graph does not hold
