"""The common part of the cases of ops with states of constant size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ridgeline.kernels.base.case import Cases, OpCase, rows_label
from ridgeline.kernels.scans.metadata import ScanMetadata

C = TypeVar("C", bound="RecurrentCase")

REAL_ROWS = ((2048,), (1,) * 64)  # a prompt, and a step of 64 requests
# Prompts of any length, rows side by side, a prompt beside rows of all kinds, and steps
SWEPT_ROWS = (
    (8192,), (65_536,), (1024,), (512,) * 16, (1984, *(512,) * 4, *(1,) * 64), (1,) * 256, (1,) * 8, (1,)
)  # fmt: skip
SMALL = 5000  # tokens of a case that needs little memory, and whose row has several segments


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
        return tuple(replace(x, writes_R=x.reads_R + 1) if isinstance(x, ScanMetadata) else x for x in given)

    def reduced(self) -> RecurrentCase:
        """Return a few shorter rows in place of many tokens."""
        if sum(self.rows) <= SMALL:
            return self
        return replace(self, rows=tuple(min(length, SMALL) for length in self.rows[:3]))  # type: ignore[type-var]

    def written(self, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Return the states of the rows, and behind them those at marks. States stand before the metadata."""
        place = next(place for place, x in enumerate(arguments) if isinstance(x, ScanMetadata))
        states, metadata = arguments[place - 1], arguments[place]
        marked_R = metadata.marked_R[metadata.marks_R > 0]
        return (states[torch.cat((metadata.writes_R[metadata.writes_R > 0], marked_R))],)


def cases_of_layers(small: Iterable[C], *layers: C) -> Cases:
    """Return the small cases without padding, whose outputs are undefined, and steps of layers of real models. The
    benchmark of kernels times the first layer, and a sweep all of them."""

    def steps(layer: C, rows: Iterable[tuple[int, ...]]) -> list[C]:
        return [replace(layer, rows=each) for each in rows]  # type: ignore[type-var]

    return Cases(
        [replace(case, padding=0) for case in small],  # type: ignore[type-var]
        steps(layers[0], REAL_ROWS),
        [case for layer in layers for case in steps(layer, SWEPT_ROWS)],
    )
