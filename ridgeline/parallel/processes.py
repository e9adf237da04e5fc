"""Ranks that are processes, joined by torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.kernels.ops import Ops

if TYPE_CHECKING:
    from ridgeline.parallel.peer_memory import PeerSums

LOADING = timedelta(hours=2)  # ranks that die meanwhile are noticed otherwise

logger = logging.getLogger(__name__)


class ProcessAxis:
    """An axis over all processes of the group that `join` made.

    Sums are made in the order of the ranks, in float32, and rounded once: so they are the same on every rank, and an
    element's does not depend on the tensor around it. Large ones on GPUs are NCCL's, where rings begin the sum of an
    element at a rank that follows from the element's place; with two ranks that is the same sum.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: Any) -> None:
        self.rank, self.size, self._store, self._asked = rank, size, store, 0
        self._sums = _peer_sums(rank, size, device) if device.type == "cuda" else None

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._sums is not None and self._sums.fits(x):
            return self._sums.all_reduce(x)
        if x.is_cuda:
            dist.all_reduce(x)
            return x
        parts = self._all(x)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(x.dtype)

    def all_reduce_norm(
        self, x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        if self._sums is not None and self._sums.fits_rows(x_TM):
            return self._sums.all_reduce_norm(x_TM, residual_TM, weight_M, eps)
        return ops.rms_norm(self.all_reduce(x_TM), residual_TM, weight_M, eps)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._all(x), -1)

    def all_to_all(self, x: Tensor) -> Tensor:
        """Send entry r of the first dimension to rank r. Return a tensor whose entry r came from rank r."""
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous())
        return received

    def smallest(self, value: int) -> int:
        # Not by a collective: ranks come here when they have loaded, which may take one much longer than others
        self._asked += 1
        self._store.set(f"smallest {self._asked} {self.rank}", str(value))
        names = [f"smallest {self._asked} {rank}" for rank in range(self.size)]
        self._store.wait(names, LOADING)
        return min(int(self._store.get(name)) for name in names)

    def _all(self, x: Tensor) -> list[Tensor]:
        mine = x.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine)
        return parts


def _peer_sums(rank: int, size: int, device: torch.device) -> PeerSums | None:
    """Return the sums of GPUs that can write to each other, or None, with a line in the log."""
    from ridgeline.parallel.peer_memory import PeerSums  # here, because it needs Triton and a build for GPUs

    try:
        return PeerSums(rank, size, device)
    except RuntimeError as error:
        logger.warning("GPUs cannot write to each other (%s); all sums over ranks are NCCL's", error)
        return None


def join(rank: int, size: int, meeting: Path, device: torch.device, limit: float) -> ProcessAxis:
    """Meet the other processes, and return their axis. Every process calls it once.

    meeting: a file that does not exist yet, on a disk that all of them see.
    limit: seconds after which a collective gives up on ranks that do not take part, with an error.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on this machine, whatever its name resolves to
    store = dist.FileStore(str(meeting), size)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=limit),
        device_id=device if device.type == "cuda" else None,
    )
    return ProcessAxis(rank, size, device, store)
