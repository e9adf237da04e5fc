"""Tables of token or position embeddings.

Legend:
    T  tokens of the step
    M  model width
    Z  rows of a table of positions
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from ridgeline.core.specs.model import Sines
from ridgeline.layers.build import Build
from ridgeline.parallel.axis import ALONE, Axis


class AddsToRows(Protocol):
    """Adapters of a table, which add to rows that are looked up."""

    def add(self, x_TM: Tensor, row_T: Tensor) -> None:
        """Add to rows that were looked up, in place. row_T: their numbers; those outside the table get nothing."""


class Embedding(nn.Module):
    """A table that ids are looked up in.

    over: the ranks that divide the rows between them.
    adapted: what adapters add to rows; None: nothing.
    """

    def __init__(self, rows: int, width: int, build: Build, over: Axis = ALONE) -> None:
        super().__init__()
        self.ops, self.over = build.ops, over
        self.adapted: AddsToRows | None = None
        self.weight = build.parameter(rows, width)

    def forward(self, ids_T: Tensor) -> Tensor:
        """Return the rows `ids_T` of the table: [T, M]."""
        if self.over.size == 1:
            x_TM, first = self.ops.embedding(ids_T, self.weight), 0
        else:
            first = len(self.weight) * self.over.rank
            x_TM = self.ops.embedding_part(ids_T, self.weight, first)
        if self.adapted is not None:
            self.adapted.add(x_TM, ids_T - first if first else ids_T)
        return x_TM if self.over.size == 1 else self.over.all_reduce(x_TM)


class SinePositions(nn.Module):
    """A table of positions that is computed, and so no parameter."""

    def __init__(self, sines: Sines, rows: int, width: int, build: Build) -> None:
        super().__init__()
        self.ops = build.ops
        table_ZM = torch.empty(rows, width, dtype=build.dtype, device=build.device)
        if not table_ZM.is_meta:
            table_ZM.copy_(sine_table(sines, rows, width))
        self.table_ZM: Tensor
        self.register_buffer("table_ZM", table_ZM, persistent=False)

    def forward(self, ids_T: Tensor) -> Tensor:
        """Return the rows `ids_T` of the table: [T, M]."""
        return self.ops.embedding(ids_T, self.table_ZM)


def sine_table(sines: Sines, rows: int, width: int) -> Tensor:
    """Return the table in float64: [Z, M]."""
    positions_Z = torch.arange(rows, dtype=torch.float64)
    angles = positions_Z.outer(10000.0 ** (-torch.arange(width // 2, dtype=torch.float64) / sines.steps))
    return torch.cat((angles.sin(), angles.cos()), dim=-1)
