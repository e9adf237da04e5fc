"""Sums over the GPUs of a machine, through memory that each of them can write to (torch's symmetric memory; no
multicast is used)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from ridgeline.kernels.ranks.all_reduce import choose, direct, triton
from ridgeline.kernels.ranks.all_reduce.direct import Memory
from ridgeline.kernels.ranks.all_reduce.peers import Peers, inbox_bytes, peers


class PeerSums:
    """One rank's memory, and that of the others as it sees it. Every rank makes one at the same time. Raise
    RuntimeError where GPUs cannot write to each other.

    with_direct: there is memory for sums of middle sizes, 50 MB on every rank (default: if they are used).
    """

    def __init__(self, rank: int, size: int, device: torch.device, *, with_direct: bool | None = None) -> None:
        if with_direct is None:
            with_direct = size in choose.DIRECT_BYTES
        self._inbox, self._handle = _shared(inbox_bytes(size), device)
        self.peers: Peers = peers(list(self._handle.buffer_ptrs), rank, device)
        self.memory: Memory | None = None
        if with_direct:
            self._rows, self._rows_handle = _shared(direct.memory_bytes(size), device)
            self.memory = direct.memory(list(self._rows_handle.buffer_ptrs), rank, device)
        dist.barrier(device_ids=[device.index])

    def fits(self, x: Tensor) -> bool:
        """Return True if this is the faster way for a tensor like this."""
        return self._way(x) != "library"

    def fits_rows(self, x_TM: Tensor) -> bool:
        """Return True if rows like these can be added up and normalized at once, and that is the faster way."""
        return self._way_of_rows(x_TM) != "library"

    def fits_gather(self, x: Tensor) -> bool:
        """Return True if this is the faster way to put tensors like this one beside each other."""
        return triton.fits_gather(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._way(x) == "direct":
            return direct.all_reduce(x, self._memory)
        return triton.all_reduce(x, self.peers)

    def all_reduce_norm(
        self, x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if self._way_of_rows(x_TM) == "direct":
            return direct.all_reduce_norm(x_TM, residual_TM, weight_M, eps, self._memory)
        return triton.all_reduce_norm(x_TM, residual_TM, weight_M, eps, self.peers)

    def all_gather(self, x: Tensor) -> Tensor:
        return triton.all_gather(x, self.peers)

    def _way(self, x: Tensor) -> choose.Way:
        has = self.memory is not None and direct.fits(x, self.memory.size)
        return choose.way(x.nbytes, self.peers.size, words=triton.fits(x), direct=has)

    def _way_of_rows(self, x_TM: Tensor) -> choose.Way:
        has = self.memory is not None and direct.fits_rows(x_TM, self.memory.size)
        return choose.way(x_TM.nbytes, self.peers.size, words=triton.fits_rows(x_TM), direct=has, norm=True)

    @property
    def _memory(self) -> Memory:
        assert self.memory is not None
        return self.memory


def _shared(nbytes: int, device: torch.device) -> tuple[Tensor, Any]:
    """Return zeros that all ranks see, and the handle that says where."""
    empty: Callable[..., Tensor] = symmetric.empty
    memory = empty(nbytes, dtype=torch.uint8, device=device)
    memory.zero_()
    torch.cuda.synchronize(device)  # before any rank writes
    return memory, symmetric.rendezvous(memory, dist.group.WORLD.group_name)  # type: ignore[union-attr]
