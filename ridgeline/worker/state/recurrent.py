"""States of constant size that every token replaces by the next.

A step reads a row's state from the block of the last token before it, and stores the new state in the block of its own
last token. If the row has a mark, the state after the mark's token is stored in the mark's block.

Legend:
    N  block ids
    R  rows
    S  slots
    C  columns of a block table
    T  tokens of the step
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.core.specs.model import ModelSpec
from ridgeline.core.specs.state import RecurrentSpec
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.scans.metadata import ScanMetadata
from ridgeline.kernels.step.op import StepMetadata
from ridgeline.kernels.step.units import GroupUnits
from ridgeline.parallel.ring import SOLO, Ring
from ridgeline.worker.share import Stretches
from ridgeline.worker.state.buffer import StateMemory
from ridgeline.worker.state.passes import pass_by_pass, scratch_of
from ridgeline.worker.state.states import DeviceRows, Verified


class Recurrent:
    """A `GroupState` for recurrent states. Every rank of `ring` has those of all rows."""

    metadata: ScanMetadata

    def __init__(
        self, memory: StateMemory, group: int, model: ModelSpec, dtype: torch.dtype, ops: Ops, ring: Ring = SOLO
    ) -> None:
        own = memory.layout.groups[group]
        assert isinstance(own.spec, RecurrentSpec)
        self._block_size, self._ops = memory.layout.block_size, ops
        self._units_NW, self._layer_step = memory.units[group], memory.layout.layer_step(group)
        self._scratch_N = torch.tensor(memory.layout.scratch_blocks(group), dtype=torch.int64, device=memory.device)
        self.layers = [self._layer(memory, group, index, own.spec, dtype) for index in range(len(own.layers))]

    def _layer(
        self, memory: StateMemory, group: int, index: int, spec: RecurrentSpec, dtype: torch.dtype
    ) -> RecurrentLayer:
        parts, offset = [], 0
        for part in spec.parts:
            kept = dtype if part.dtype is None else getattr(torch, part.dtype)
            parts.append(memory.view(group, index, kept, part.shape, offset))
            offset += part.num_bytes(memory.layout.dtype)
        return RecurrentLayer(self, tuple(parts))

    def begin(self, rows: DeviceRows, block_table_SC: Tensor, place_T: Tensor) -> None:
        def find(start_R1: Tensor, kv_len_R: Tensor, last_R: Tensor, marks_R: Tensor | None) -> StepMetadata:
            size = self._block_size
            return self._ops.step_metadata(
                rows.slots_R, start_R1, kv_len_R, last_R, place_T, marks_R, block_table_SC, size
            )  # fmt: skip

        if rows.verifies:
            self.metadata = pass_by_pass(rows, find, self._scratch_N)
            return
        found = find(rows.start_R1, rows.kv_len_R, rows.last_R, rows.marks_R)
        scan = rows.share.scan if isinstance(rows.share, Stretches) else None
        self.metadata = ScanMetadata(
            rows.start_R1, *found, num_tokens=rows.num_tokens, tokens_each=rows.tokens_each, divided=scan
        )  # fmt: skip

    def keep(self, verified: Verified, block_table_SC: Tensor) -> None:
        slots_R, kv_len_R, active_R, num_logits_R, kv_len_S, columns, _ = verified
        scratch_DR = scratch_of(self._scratch_N, columns - 1, len(slots_R))
        units = GroupUnits(self._units_NW, block_table_SC, self._block_size, len(self.layers), self._layer_step)
        self._ops.step_keep(slots_R, kv_len_R, active_R, num_logits_R, kv_len_S, scratch_DR, units)

    def layer(self, index: int) -> RecurrentLayer:
        return self.layers[index]


class RecurrentLayer:
    """The states of one layer. `parts` are its tensors, each [N, …] by block id; `metadata` says which of them a kernel
    reads and writes."""

    def __init__(self, group: Recurrent, parts: tuple[Tensor, ...]) -> None:
        self._group, self.parts = group, parts

    @property
    def metadata(self) -> ScanMetadata:
        return self._group.metadata

    def load(self, part: int = 0) -> Tensor:
        """Return the rows' states before the step, [R, …]."""
        metadata, states_N = self.metadata, self.parts[part]
        fresh_R = metadata.fresh_R.view(-1, *[1] * (states_N.dim() - 1))
        return states_N.index_select(0, metadata.reads_R).masked_fill(fresh_R, 0)

    def store(self, states_R: Tensor, part: int = 0) -> None:
        """Store the rows' states after the step, [R, …]."""
        self.keep(self.metadata.writes_R, states_R, part)

    def keep(self, blocks_R: Tensor, states_R: Tensor, part: int = 0) -> None:
        """Store states in these blocks."""
        states_N = self.parts[part]
        states_N.index_copy_(0, blocks_R, states_R.to(states_N.dtype))
