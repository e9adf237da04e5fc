"""A rank among others, and what a way of doing a collective makes for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.parallel.exchange import Exchange
from ridgeline_bench.communication.cases import WIDTH


class Unavailable(Exception):
    """Raised where a way does not exist, with the reason."""


class Trial(NamedTuple):
    """A collective that is ready to run.

    input: where the rank's numbers go. call: runs it and returns the result. beside: returns what the last call left
    besides, where that is a part of the result.
    """

    input: Tensor
    call: Callable[[], Tensor]
    beside: Callable[[], Tensor] | None = None

    def run(self) -> Tensor:
        """Return all that a call results in: [N]."""
        result = self.call()
        return result if self.beside is None else torch.cat([self.beside().reshape(-1), result.reshape(-1)])


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
        """Our sums over peer memory, those of middle sizes too."""
        self._on_gpus()
        from ridgeline.parallel.peer_memory import PeerSums  # it needs Triton and a build for GPUs

        return PeerSums(self.rank, self.size, self.device, with_direct=True)

    def exchange(self, tokens: int, width: int) -> Exchange:
        """Return our exchange over peer memory, for so many tokens of each rank."""
        self._on_gpus()
        from ridgeline.parallel.peer_exchange import PeerExchange  # likewise

        size, swaps = self.dtype.itemsize, _Swaps(self.rank, self.size)
        return PeerExchange(swaps, self.device, most=tokens, width=width, used=1, itemsize=size)

    def shared(self, count: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Any]:
        """Return memory that the other ranks can write to, and its handle."""
        self._on_gpus()
        import torch.distributed._symmetric_memory as symmetric

        x_N = symmetric.empty(count, dtype=dtype or self.dtype, device=self.device).zero_()
        torch.cuda.synchronize(self.device)
        return x_N, symmetric.rendezvous(x_N, self.group)

    @cached_property
    def kept(self) -> list[Tensor]:
        """Memory that must outlive its trial."""
        return []

    def _on_gpus(self) -> None:
        if self.device.type != "cuda":
            raise Unavailable("needs GPUs")

    @cached_property
    def levels(self) -> tuple[Any, Any]:
        """The groups of a sum on two levels: this rank's pair, and those that have its place in the other pairs."""
        pairs = [dist.new_group([first, first + 1]) for first in range(0, self.size, 2)]
        across = [dist.new_group(list(range(place, self.size, 2))) for place in range(2)]
        return pairs[self.rank // 2], across[self.rank % 2]

    @property
    def group(self) -> Any:
        """The name of the group of all ranks."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD.group_name


@dataclass
class _Swaps:
    """The part of the ranks that an exchange over peer memory needs."""

    rank: int
    size: int

    def smallest(self, value: int) -> int:
        return value

    def all_to_all(self, x: Tensor) -> Tensor:
        raise NotImplementedError("peer memory has no use for it")

    def begin_all_to_all(self, x: Tensor) -> Callable[[], Tensor]:
        raise NotImplementedError("peer memory has no use for it")


Way = Callable[[Room, int], Trial]


def rows_to_norm(room: Room, count: int) -> tuple[Tensor, Tensor]:
    """Return weights of one and residuals of zero, [M] and [T, M]."""
    width = min(WIDTH, count)
    return torch.ones(width, dtype=room.dtype, device=room.device), room.zeros(count // width * width).view(-1, width)
