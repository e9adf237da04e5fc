"""Ranks that divide the tokens between them, and pass each other queries, keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ridgeline.parallel.axis import Alone, Axis

Shape = tuple[int, ...]


class Passing(Protocol):
    """A tensor on its way to the next rank."""

    def wait(self) -> Tensor:
        """Return the tensor that the rank before has sent. The tensor that was sent may be overwritten afterwards."""


class Ring(Axis, Protocol):
    """An axis whose ranks also send tensors to single ranks. All of them call the same methods in the same order."""

    def passed_on(self, x: Tensor) -> Passing:
        """Begin to send x to the next rank, and to receive a tensor of the same shape from the one before."""

    def exchanged(self, parts: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """Send parts[r] to rank r. Return what each rank has sent here, of these shapes."""

    def stacked(self, x: Tensor) -> Tensor:
        """Return all ranks' tensors behind each other, in a new first dimension."""


class Solo(Alone):
    """The ring of a single rank, without neighbours."""

    def passed_on(self, x: Tensor) -> Passing:
        raise AssertionError("a single rank passes nothing on")

    def exchanged(self, parts: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        return list(parts)

    def stacked(self, x: Tensor) -> Tensor:
        return x[None]


SOLO = Solo()
