"""The common part of the cases of ops with states of constant size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch

from ridgeline.kernels.case import OpCase, rows_label
from ridgeline.kernels.turns import Turns

C = TypeVar("C", bound="RecurrentCase")

REAL_ROWS = ((2048,), (1,) * 64)  # a prompt, and a step of 64 requests


class RecurrentCase(OpCase):
    """A case of an op with states. Outputs are compared with the reference's; tests compare the states too.

    rows: the tokens of each row.
    padding: tokens behind the last row's.
    """

    epsilons: ClassVar[int] = 16
    rows: tuple[int, ...]
    padding: int

    @property
    def label(self) -> str:
        return f"{rows_label(self.rows)} {self.shape}"

    @property
    def shape(self) -> str:
        """The layer in a table of results."""
        raise NotImplementedError

    @property
    def slack(self) -> int:
        return 512  # what float32 sums of some dozen products of order ten lose

    @property
    def counts(self) -> tuple[int, int]:
        """All tokens, and the rows that have some."""
        return sum(self.rows), sum(length > 0 for length in self.rows)

    def lasting(self, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        """Return the inputs, with rows that write to the free blocks behind those that they read."""
        given = self.inputs(dtype, device)
        return tuple(replace(x, writes_R=x.reads_R + 1) if isinstance(x, Turns) else x for x in given)


def unpadded(cases: Iterable[C]) -> tuple[C, ...]:
    """Return the cases without padding, whose outputs nobody defines."""
    return tuple(replace(case, padding=0) for case in cases)  # type: ignore[type-var]
