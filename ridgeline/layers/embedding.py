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
        rows = len(self.weight)
        own_T = ids_T - rows * self.over.rank
        held_T = (own_T >= 0) & (own_T < rows)
        x_TM = self.ops.embedding(own_T.where(held_T, 0), self.weight)
        return self.over.all_reduce(x_TM.where(held_T[:, None], 0))
