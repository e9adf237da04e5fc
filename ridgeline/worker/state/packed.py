"""Bidirectional attention among the tokens of a step: nothing is kept, and rows lie packed behind one another.

Legend:
    T  tokens of the step
    H  query heads
    D  head width
    X  (H + 2 G) D, columns of the fused projection
    S  slots
    C  columns of a block table
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.core.errors import ContractViolation
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.attention.packed.disentangled import disentangled_attention
from ridgeline.kernels.attention.packed.op import PackedRows
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.ops import Ops
from ridgeline.layers.heads import Heads
from ridgeline.worker.state.buffer import StateMemory
from ridgeline.worker.state.states import DeviceRows, Verified


class PackedLayer:
    """The rows of a step that lie packed, a `layers.attention.Attends`. rows: of the step that runs."""

    rows: PackedRows

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def attend(self, qkv_TX: Tensor, positions_T: Tensor, heads: Heads, room: Rounded | None = None) -> Tensor:
        """Return the attended heads, [T, H * D]."""
        q_THD, k_TGD, v_TGD = heads.split(qkv_TX, positions_T)
        spec = heads.spec
        if heads.distances is not None:
            return disentangled_attention(q_THD, k_TGD, v_TGD, self.rows, spec.scale, heads.distances).flatten(1)
        out_THD = self.ops.packed_attention(q_THD, k_TGD, v_TGD, self.rows, spec.scale, spec.window, heads.bias_HL)
        return out_THD.flatten(1)


class Packed(PackedLayer):
    """A `GroupState` without memory, which stands for all of its layers."""

    def __init__(self, memory: StateMemory, group: int, model: ModelSpec, dtype: torch.dtype, ops: Ops) -> None:
        super().__init__(ops)

    def begin(self, rows: DeviceRows, block_table_SC: Tensor, place_T: Tensor) -> None:
        """Note the step's rows. Their lengths must be known here, so such a step is no captured graph."""
        if rows.num_tokens_R is None:
            raise ContractViolation("bidirectional attention sizes its work on the host; it cannot be captured.")
        self.rows = PackedRows.of(rows.num_tokens_R)

    def keep(self, verified: Verified, block_table_SC: Tensor) -> None:
        """Do nothing: nothing is kept."""

    def layer(self, index: int) -> Packed:
        return self
