"""Tables of token or position embeddings.

Legend:
    T  tokens of the step
    M  model width
"""

from __future__ import annotations

from torch import Tensor, nn

from ridgeline.layers.build import Build
from ridgeline.parallel.axis import ALONE, Axis


class Embedding(nn.Module):
    """A table that ids are looked up in.

    over: the ranks that divide the rows between them.
    """

    def __init__(self, rows: int, width: int, build: Build, over: Axis = ALONE) -> None:
        super().__init__()
        self.ops, self.over = build.ops, over
        self.weight = build.parameter(rows, width)

    def forward(self, ids_T: Tensor) -> Tensor:
        """Return the rows `ids_T` of the table: [T, M]."""
        if self.over.size == 1:
            return self.ops.embedding(ids_T, self.weight)
        x_TM = self.ops.embedding_part(ids_T, self.weight, len(self.weight) * self.over.rank)
        return self.over.all_reduce(x_TM)
