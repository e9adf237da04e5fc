"""What work costs at the least: bytes through device memory and floating-point operations.

Each op's `cost.py` counts from shapes alone (torch-free): every input read once, every output written once. `perf/`
turns counts into times on a given machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


class Cost(NamedTuple):
    """Fewest bytes moved through device memory, and FLOPs (a multiply-add counts two)."""

    bytes: float
    flops: float

    def __add__(self, other: object) -> Cost:  # the sum of costs, not tuple concatenation
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(self.bytes + other.bytes, self.flops + other.flops)

    @property
    def intensity(self) -> float:
        """FLOPs per byte; compare with the machine's ridge point."""
        return self.flops / self.bytes if self.bytes else float("inf")


@dataclass(frozen=True)
class OpCost:
    """One op of a step, `count` times (once per layer, say), each after the one before it. `cost` is of one time."""

    name: str
    cost: Cost
    count: int = 1


class StepShape(NamedTuple):
    """What decides a step's cost. Per row R: tokens run, and tokens cached once they are; rows that sample.

    shared: how many cached tokens all rows begin with, whose keys and values one read could serve.
    """

    num_tokens_R: np.ndarray | Sequence[int]
    kv_len_R: np.ndarray | Sequence[int]
    num_sampled: int
    shared: int = 0


class CostModel(Protocol):
    """Seconds a step needs at the least on the machine at hand. The engine only knows this protocol."""

    def step_limit(self, shape: StepShape) -> float: ...


class Headroom(NamedTuple):
    """Seconds some steps took, and the least they could have taken (0: no cost model)."""

    elapsed: float = 0.0
    limit: float = 0.0

    def plus(self, elapsed: float, limit: float) -> Headroom:
        return Headroom(self.elapsed + elapsed, self.limit + limit)

    def since(self, earlier: Headroom) -> Headroom:
        return Headroom(self.elapsed - earlier.elapsed, self.limit - earlier.limit)

    @property
    def share(self) -> float | None:
        """Limit ÷ measured: 1 is as fast as the hardware allows. None if either is unknown."""
        return self.limit / self.elapsed if self.limit > 0 and self.elapsed > 0 else None
