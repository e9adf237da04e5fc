"""States of constant size that every token replaces by the next.

A step reads a row's state from the block of the last token before it, and leaves the new state in the block of its own
last token. All rows read before any row writes, so one row may read a block that belongs to another.

Legend:
    N  block ids
    R  rows
    S  slots
    C  columns of a block table
    T  tokens of the step
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.core.cache_layout import NULL_BLOCK
from ridgeline.core.model_spec import ModelSpec
from ridgeline.core.state_spec import RecurrentSpec
from ridgeline.kernels.ops import Ops
from ridgeline.worker.state.buffer import StateMemory
from ridgeline.worker.state.states import DeviceRows


class Turns(NamedTuple):
    """The blocks that the step's rows read and write.

    start_R1: the first token of each row, then the number of tokens.
    reads_R, writes_R: block ids, int64. Rows that the device has stopped, and rows without tokens, write to the null
        block.
    fresh_R: bool, rows whose state begins with zeros.
    """

    start_R1: Tensor
    reads_R: Tensor
    writes_R: Tensor
    fresh_R: Tensor


class Recurrent:
    """A `GroupState` for recurrent states."""

    turns: Turns

    def __init__(self, memory: StateMemory, group: int, model: ModelSpec, dtype: torch.dtype, ops: Ops) -> None:
        own = memory.layout.groups[group]
        assert isinstance(own.spec, RecurrentSpec)
        kept = getattr(torch, own.spec.dtype)
        self._block_size = memory.layout.block_size
        self.views = [memory.view(group, index, kept, own.spec.shape) for index in range(len(own.layers))]

    def begin(self, rows: DeviceRows, block_table_SC: Tensor, place_T: Tensor) -> None:
        size = self._block_size
        before_R = rows.kv_len_R - rows.start_R1.diff()  # tokens before the step; below 1 for stopped rows
        column_R = (before_R - 1).clamp(min=0) // size
        writes_R = torch.where(rows.kv_len_R > 0, place_T[rows.last_R] // size, NULL_BLOCK)
        reads_R = block_table_SC[rows.slots_R.long(), column_R].long()
        self.turns = Turns(rows.start_R1, reads_R, writes_R, before_R <= 0)

    def layer(self, index: int) -> RecurrentLayer:
        return RecurrentLayer(self, self.views[index])


class RecurrentLayer:
    """The states of one layer, `states_N` [N, …]. `turns` says which of them a kernel reads and writes."""

    def __init__(self, group: Recurrent, states_N: Tensor) -> None:
        self._group, self.states_N = group, states_N

    @property
    def turns(self) -> Turns:
        return self._group.turns

    def load(self) -> Tensor:
        """Return the rows' states before the step, [R, …]."""
        turns = self.turns
        fresh_R = turns.fresh_R.view(-1, *[1] * (self.states_N.dim() - 1))
        return self.states_N.index_select(0, turns.reads_R).masked_fill(fresh_R, 0)

    def store(self, states_R: Tensor) -> None:
        """Store the rows' states after the step, [R, …]."""
        self.states_N.index_copy_(0, self.turns.writes_R, states_R.to(self.states_N.dtype))
