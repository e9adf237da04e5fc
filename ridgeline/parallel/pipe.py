"""The stages of a pipeline, as one rank of a stage sees them: hidden states go from stage to stage, and the tokens that
the last stage draws go back to all others.

Legend:
    T  tokens of a plan
    M  model width
    R  rows of a plan
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

Wait = Callable[[], object]  # waits for something that has begun; on a GPU the stream does


class Pipe(Protocol):
    """A rank's place among the stages. Neighbours exchange the same plans' tensors in the same order. On a GPU nothing
    waits but the stream.

    rank: the stage's number. size: how many stages there are.
    """

    rank: int
    size: int

    def receive(self, into_TM: Tensor) -> None:
        """Take the hidden states of the stage before."""

    def send(self, x_TM: Tensor) -> None:
        """Send hidden states to the next stage. No code may write to x afterwards."""

    def hear(self, into_R: Tensor) -> Wait:
        """Begin to take the tokens that the last stage draws for a plan. They are there when the returned function has
        been called. Calling this without delay lets the last stage go on, however long the tokens are not wanted."""

    def tell(self, token_R: Tensor) -> None:
        """Send all other stages the tokens that this one, the last, has drawn. No code may write to them afterwards."""

    def smallest(self, value: int) -> int:
        """Return the smallest value that a stage has."""


class Whole:
    """The pipe of a rank that has all layers, without neighbours."""

    rank = 0
    size = 1

    def receive(self, into_TM: Tensor) -> None:
        raise AssertionError("the only stage has none before it")

    def send(self, x_TM: Tensor) -> None:
        raise AssertionError("the only stage has none behind it")

    def hear(self, into_R: Tensor) -> Wait:
        raise AssertionError("the only stage draws all tokens itself")

    def tell(self, token_R: Tensor) -> None:
        pass

    def smallest(self, value: int) -> int:
        return value


WHOLE = Whole()
