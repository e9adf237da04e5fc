"""The treatment of an attention layer's heads between its fused projection and the attention itself.

Legend:
    T  tokens of the step
    H  query heads
    G  key/value heads
    D  head width
    Z  rows of the table of angles, one for each position
    Y  rotated width
    L  distances of keys from queries
    A  distances of places along an axis
    X  (H + 2 G) D, columns of the fused projection; (H + G) D if values are the keys' projection
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ridgeline.core.specs.model import AttentionSpec
from ridgeline.kernels.attention.packed.disentangled import Distances
from ridgeline.kernels.attention.paged.op import Softmax
from ridgeline.kernels.base.kv_cache import KVScales
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.small.rotary.op import split_heads, without_weight


class GridVectors(NamedTuple):
    """The vectors of distances in rows and in columns, [distances, D] each, and the projection of a place that only
    fills up a window."""

    rows_AD: Tensor
    columns_AD: Tensor
    filling_X: Tensor


class Heads(NamedTuple):
    """The norms, the rotation and the softmax of an attention layer's heads. Queries and keys are normalised head by
    head if there are weights for it, then rotated if there is a table of angles.

    kv_scales_G2: float32, the scales of keys and of values that the checkpoint brings; None without.
    saturated_1: int64, counts the numbers that these could not hold.
    grid: vectors of distances in windows of places.
    distances: what bidirectional attention multiplies queries and keys with besides each other.
    bias_HL: what bidirectional attention adds to scores by distance (`kernels/attention/packed/op.py`). That of causal
        attention is a part of the softmax.
    """

    spec: AttentionSpec
    ops: Ops
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    eps: float
    cos_sin_ZY: Tensor | None
    softmax: Softmax
    kv_scales_G2: Tensor | None = None
    saturated_1: Tensor | None = None
    bias_HL: Tensor | None = None
    distances: Distances | None = None
    grid: GridVectors | None = None

    def kv_scales_of(self, cache_NGPD: Tensor) -> KVScales:
        """Return the checkpoint's scales as a cache's."""
        assert self.kv_scales_G2 is not None
        pairs_NGP2 = self.kv_scales_G2[None, :, None].expand(*cache_NGPD.shape[:3], 2)
        return KVScales(pairs_NGP2=pairs_NGP2, saturated_1=self.saturated_1)

    def split(self, qkv_TX: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, H, D], keys and values [T, G, D], normalised and rotated. Differentiable."""
        spec, ops = self.spec, self.ops
        q_THD, k_TGD, v_TGD = split_heads(qkv_TX, spec.num_heads, spec.num_kv_heads, spec.head_dim)
        if spec.v_norm:
            v_TGD = without_weight(v_TGD, self.eps)
        if self.q_norm_D is not None and self.k_norm_D is not None:
            q_THD = ops.rms_norm(q_THD, None, self.q_norm_D, self.eps)[0]
            k_TGD = ops.rms_norm(k_TGD, None, self.k_norm_D, self.eps)[0]
        if self.cos_sin_ZY is not None:
            q_THD, k_TGD = ops.rope(q_THD, k_TGD, self.cos_sin_ZY, positions_T)
        return q_THD, k_TGD, v_TGD
