"""The least work that an op can do: bytes through device memory, and floating-point operations.

Each op's `cost.py` counts both from shapes alone and without torch. Every input is read once and every output is
written once. `perf/` turns these counts into times on a given machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np


class Cost(NamedTuple):
    """The fewest bytes moved through device memory, and the FLOPs (a multiply-add counts as two)."""

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
    """An op of a step that runs `count` times, for example once per layer, each time after the one before. `cost` is
    that of one time."""

    name: str
    cost: Cost
    count: int = 1


class StepShape(NamedTuple):
    """The numbers that decide a step's cost.

    num_tokens_R: the tokens that each row runs.
    kv_len_R: the tokens of each row that are cached after the step.
    num_sampled: how many rows draw a token.
    shared: how many cached tokens all rows have in common at their beginning. One read could serve their keys and
        values.
    reach: how many experts of a mixture the tokens reach, divided by how many uniform routing would reach. 1 where it
        was not measured.
    encoded: the tokens of each encoder input that the step reads.
    crossed_R: the tokens of encoder input to which each row attends; none: as many as are cached.
    views: the patches of each view of a picture, or frame of a video, that a tower sees in the step.
    """

    num_tokens_R: np.ndarray | Sequence[int]
    kv_len_R: np.ndarray | Sequence[int]
    num_sampled: int
    shared: int = 0
    reach: float = 1.0
    encoded: np.ndarray | Sequence[int] = ()
    crossed_R: np.ndarray | Sequence[int] = ()
    views: Sequence[int] = ()


class CostModel(Protocol):
    """A lower bound on the time of a step, in seconds, on the machine at hand. The engine knows no more than this
    protocol."""

    def step_limit(self, shape: StepShape) -> float: ...


@runtime_checkable
class SumModel(CostModel, Protocol):
    """A cost model that may answer from sums alone, where `sums_suffice`: in a fraction of the time."""

    @property
    def sums_suffice(self) -> bool: ...
    def of_prompt(self, rows: int, keys: float, tokens: int, length: int) -> float: ...


class Headroom(NamedTuple):
    """The seconds that some steps took, and the least that they could have taken (0 without a cost model)."""

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
