"""Attention among patches, each within its row of them.

Legend:
    T  patches
    X  columns of the fused projection
    Y  width of a head, and of what it grows by
"""

from __future__ import annotations

from math import sqrt

from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.attention.packed.op import PackedRows
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.ops import Ops
from ridgeline.layers.heads import Heads

WIDER = 16  # numbers by which a head grows for the mask, so that its width stays a multiple of this
UNSEEN = 1e4  # what is taken from a score of two places that do not see each other


class PackedViews:
    """Rows of patches that lie packed, a `layers.attention.Attends`."""

    def __init__(self, ops: Ops, rows: PackedRows) -> None:
        self._ops, self.rows = ops, rows

    def attend(self, qkv_TX: Tensor, positions_T: Tensor, heads: Heads, buffer: Rounded | None = None) -> Tensor:
        """Return the attended heads, [T, H * D]."""
        q_THD, k_TGD, v_TGD = heads.split(qkv_TX, positions_T)
        spec = heads.spec
        found_THD = self._ops.packed_attention(q_THD, k_TGD, v_TGD, self.rows, spec.scale, spec.window, heads.bias_HL)
        return found_THD.flatten(1)


class MaskedViews:
    """Rows of places, a `layers.attention.Attends`. All places of a row see each other, but for those of `asking_T`,
    which do not see those of `hidden_T`: bool [T] each.

    That mask is a product of two vectors, so it becomes one more number of queries and of keys.
    """

    def __init__(self, ops: Ops, rows: PackedRows, asking_T: Tensor, hidden_T: Tensor) -> None:
        self._ops, self._rows, self._asking_T, self._hidden_T = ops, rows, asking_T, hidden_T

    def attend(self, qkv_TX: Tensor, positions_T: Tensor, heads: Heads, buffer: Rounded | None = None) -> Tensor:
        """Return the attended heads, [T, H * D]."""
        q_THY, k_THY, v_THY = heads.split(qkv_TX, positions_T)
        scale, width = heads.spec.scale, q_THY.shape[2]
        q_THY, k_THY, v_THY = (F.pad(each, (0, WIDER)) for each in (q_THY, k_THY, v_THY))
        half = sqrt(UNSEEN / scale)  # all of it on one side is infinite in float16
        q_THY[..., width : width + 1] = self._asking_T[:, None, None].to(q_THY.dtype) * half
        k_THY[..., width : width + 1] = self._hidden_T[:, None, None].to(q_THY.dtype) * -half
        out_THY = self._ops.packed_attention(q_THY, k_THY, v_THY, self._rows, scale, None, None)
        return out_THY[..., :width].flatten(1)
