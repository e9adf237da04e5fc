"""Small sums over the GPUs of a machine, through memory that each of them can write to (torch's symmetric memory; no
multicast is used)."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from ridgeline.kernels.all_reduce.peers import inbox_bytes, peers
from ridgeline.kernels.all_reduce.triton import all_reduce, all_reduce_norm, fits, fits_rows


class PeerSums:
    """One rank's inbox, and those of the others as it sees them. Every rank makes one at the same time. Raise
    RuntimeError where GPUs cannot write to each other."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self._inbox = symmetric.empty(inbox_bytes(size), dtype=torch.uint8, device=device)
        self._inbox.zero_()
        torch.cuda.synchronize(device)  # before anybody writes
        self._handle = symmetric.rendezvous(self._inbox, dist.group.WORLD.group_name)  # type: ignore[union-attr]
        self.peers = peers(list(self._handle.buffer_ptrs), rank, device)
        dist.barrier(device_ids=[device.index])

    def fits(self, x: Tensor) -> bool:
        """Return True if this is the faster way for a tensor like this."""
        return fits(x)

    def fits_rows(self, x_TM: Tensor) -> bool:
        """Return True if rows like these can be added up and normalized at once."""
        return fits_rows(x_TM)

    def all_reduce_norm(
        self, x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return all_reduce_norm(x_TM, residual_TM, weight_M, eps, self.peers)

    def all_reduce(self, x: Tensor) -> Tensor:
        return all_reduce(x, self.peers)
