"""The ranks along one axis of a mesh, and what they say to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ridgeline.kernels.ops import Ops


class Axis(Protocol):
    """The ranks that divide something between them, as one of them sees it. Every rank calls the same methods in the
    same order with tensors of the same shapes.

    rank: this one's number. size: how many there are.
    """

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, in x's dtype and with the same bits on every rank. x may be
        overwritten."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return all ranks' tensors side by side: their last dimensions are joined, in the order of ranks."""

    def reduce_scatter(self, x_TM: Tensor) -> Tensor:
        """Return this rank's share of the rows of the sum of all ranks' x, of which there are a multiple of `size`."""

    def gather_rows(self, x_TM: Tensor) -> Tensor:
        """Return all ranks' rows, in the order of ranks."""

    def all_reduce_norm(
        self, x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        """Return the result of the op `rms_norm` for the sum of all ranks' x."""

    def smallest(self, value: int) -> int:
        """Return the smallest value that a rank has."""


class SwapsRows(Protocol):
    """Ranks that can send each other unequal numbers of rows."""

    rank: int
    size: int

    def swap_rows(self, x_NB: Tensor, sent: Sequence[int], came: Sequence[int]) -> Tensor:
        """Send the next `sent[r]` rows to each rank r. Return the `came[r]` rows of each, in the order of ranks."""


class Alone:
    """The axis of a single rank, without neighbours."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def reduce_scatter(self, x_TM: Tensor) -> Tensor:
        return x_TM

    def gather_rows(self, x_TM: Tensor) -> Tensor:
        return x_TM

    def all_reduce_norm(
        self, x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        return ops.rms_norm(x_TM, residual_TM, weight_M, eps)

    def smallest(self, value: int) -> int:
        return value


class Deferred:
    """The ranks of an axis, for a part of a layer whose results another part adds up."""

    def __init__(self, axis: Axis) -> None:
        self.rank, self.size, self._axis = axis.rank, axis.size, axis

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return self._axis.all_gather(x)

    def reduce_scatter(self, x_TM: Tensor) -> Tensor:
        raise AssertionError("a sum that another part makes is not divided")

    def gather_rows(self, x_TM: Tensor) -> Tensor:
        return self._axis.gather_rows(x_TM)

    def all_reduce_norm(
        self, x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        raise AssertionError("a sum that another part makes has no norm")

    def smallest(self, value: int) -> int:
        return self._axis.smallest(value)


ALONE = Alone()
