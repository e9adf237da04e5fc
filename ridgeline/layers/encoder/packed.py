"""Attention among patches, each within its row of them.

Legend:
    T  patches
    X  columns of the fused projection
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.attention.packed.op import PackedRows
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.ops import Ops
from ridgeline.layers.heads import Heads


class PackedViews:
    """Rows of patches that lie packed, a `layers.attention.Attends`."""

    def __init__(self, ops: Ops, rows: PackedRows) -> None:
        self._ops, self._rows = ops, rows

    def attend(self, qkv_TX: Tensor, positions_T: Tensor, heads: Heads, buffer: Rounded | None = None) -> Tensor:
        """Return the attended heads, [T, H * D]."""
        q_THD, k_TGD, v_TGD = heads.split(qkv_TX, positions_T)
        spec = heads.spec
        return self._ops.packed_attention(q_THD, k_TGD, v_TGD, self._rows, spec.scale, spec.window, None).flatten(1)
