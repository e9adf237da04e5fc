"""Tables of token or position embeddings.

Legend:
    T  tokens of the step
    M  model width
"""

from __future__ import annotations

from torch import Tensor, nn

from ridgeline.layers.build import Build


class Embedding(nn.Module):
    """A table that ids are looked up in."""

    def __init__(self, rows: int, width: int, build: Build) -> None:
        super().__init__()
        self.ops = build.ops
        self.weight = build.parameter(rows, width)

    def forward(self, ids_T: Tensor) -> Tensor:
        """Return the rows `ids_T` of the table: [T, M]."""
        return self.ops.embedding(ids_T, self.weight)
