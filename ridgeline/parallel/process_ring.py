"""A ring of processes over torch.distributed (gloo on CPUs, NCCL on GPUs)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.parallel.processes import ProcessAxis
from ridgeline.parallel.ring import Shape


@dataclass(frozen=True)
class Sent:
    """A `Passing` between processes. It holds what is sent until it has left."""

    works: list[Any]
    kept: Tensor
    received: Tensor

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


class ProcessRing(ProcessAxis):
    """A `Ring` over processes that `join` brought together."""

    def passed_on(self, x: Tensor) -> Sent:
        mine, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        to, source = self._members[(self.rank + 1) % self.size], self._members[(self.rank - 1) % self.size]
        return Sent(self._started([(to, mine)], [(source, received)]), mine, received)

    def exchanged(self, parts: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        received = [parts[0].new_empty(shape) for shape in shapes]
        received[self.rank] = parts[self.rank]
        outgoing = [(self._members[rank], parts[rank].contiguous()) for rank in others]
        for work in self._started(outgoing, [(self._members[rank], received[rank]) for rank in others]):
            work.wait()
        return received

    def stacked(self, x: Tensor) -> Tensor:
        mine = x.contiguous()
        together = mine.new_empty(self.size, *mine.shape)
        dist.all_gather(list(together), mine, group=self._group)
        return together

    def _started(self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]]) -> list[Any]:
        """Begin to send and to receive. Empty tensors are neither sent nor received."""
        sends = [dist.P2POp(dist.isend, x, to, self._group) for to, x in outgoing if x.numel()]
        receives = [dist.P2POp(dist.irecv, x, source, self._group) for source, x in incoming if x.numel()]
        return dist.batch_isend_irecv(sends + receives) if sends or receives else []
