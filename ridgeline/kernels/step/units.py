"""The cached memory of a cache group, as ops move it.

Legend:
    S  slots
    C  columns of a block table
    N  block ids
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class GroupUnits(NamedTuple):
    """The words of a group's units in all of its layers.

    words_N: [N, …]: those of a unit by block id. Those of layer l lie l * layer_step ids further.
    """

    words_N: Tensor
    block_table_SC: Tensor
    block_size: int
    layers: int
    layer_step: int
