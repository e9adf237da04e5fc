"""Rotary position embedding, which rotates halves (NeoX order). Su et al., arXiv 2104.09864.

`rope` rotates and does nothing else. `rope_kv` does everything between a fused q, k, v projection and the attention.

Legend:
    T  tokens
    H  query heads
    G  key/value heads
    D  head width
    Z  rows of the table of angles, one for each position
    Y  rotated width (Y <= D); y = Y / 2, the pairs that rotate
    X  (H + 2 G) D, columns of the fused projection
    N  cache blocks
    P  tokens per block
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.base import kv_cache
from ridgeline.kernels.base.kv_cache import KVScales
from ridgeline.kernels.base.op import Implementation, Op, nowhere, on_cpu, on_gpu
from ridgeline.kernels.small.norm.op import rms_norm


def rope(q_THD: Tensor, k_TGD: Tensor, cos_sin_ZY: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first Y elements of each head by its token's position. Returns new tensors of the same shapes and
    dtypes.

    cos_sin_ZY: float32; row p holds the cosines of the Y/2 angles at position p, then their sines.
    positions_T: integers in 0..Z-1.
    """
    return rotate(q_THD, cos_sin_ZY, positions_T), rotate(k_TGD, cos_sin_ZY, positions_T)


def rotate(x_THD: Tensor, cos_sin_ZY: Tensor, positions_T: Tensor) -> Tensor:
    """Rotate heads as `rope` does, all of them alike."""
    cos_T1y, sin_T1y = cos_sin_ZY[positions_T].unsqueeze(1).chunk(2, dim=-1)
    half = cos_T1y.shape[-1]
    a, b, rest = x_THD.float().split((half, half, x_THD.shape[-1] - 2 * half), dim=-1)
    rotated = (a * cos_T1y).addcmul_(b, sin_T1y, value=-1), (b * cos_T1y).addcmul_(a, sin_T1y)
    return torch.cat((*rotated, rest), dim=-1).to(x_THD.dtype)


class Projected(NamedTuple):
    """A fused projection, and what becomes of its heads.

    qkv_TX: rows of q, k and v, one behind the other, with contiguous columns. Without v, values are k, before its norm
        and rotation.
    q_norm_D, k_norm_D: weights of an RMSNorm, or both None.
    cos_sin_ZY: as in `rope`, or None for no rotation.
    place_T: block * P + offset. Of tokens that share a place (padding, in the null block) either one's key stays there.
    v_norm: values are normalised too, without a weight.
    scales: those of caches of 8 bits, and None for others. A row's own are written too.
    """

    qkv_TX: Tensor
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    eps: float
    cos_sin_ZY: Tensor | None
    positions_T: Tensor
    k_cache_NGPD: Tensor
    v_cache_NGPD: Tensor
    place_T: Tensor
    num_heads: int
    num_kv_heads: int
    v_norm: bool = False
    scales: KVScales | None = None


def rope_kv(projected: Projected) -> Tensor:
    """Normalise queries and keys head by head, rotate them, and store keys and values. Returns rotated queries [T, H,
    D], contiguous."""
    (
        qkv_TX, q_norm_D, k_norm_D, eps, cos_sin_ZY, positions_T, k_cache_NGPD, v_cache_NGPD, place_T, num_heads,
        num_kv_heads, v_norm, scales,
    ) = projected  # fmt: skip
    q_THD, k_TGD, v_TGD = split_heads(qkv_TX, num_heads, num_kv_heads, k_cache_NGPD.shape[3])
    if v_norm:
        v_TGD = without_weight(v_TGD, eps)
    if q_norm_D is not None and k_norm_D is not None:
        q_THD, k_TGD = rms_norm(q_THD, None, q_norm_D, eps)[0], rms_norm(k_TGD, None, k_norm_D, eps)[0]
    if cos_sin_ZY is not None:
        q_THD, k_TGD = rope(q_THD, k_TGD, cos_sin_ZY, positions_T)
    write_kv(k_TGD, v_TGD, k_cache_NGPD, v_cache_NGPD, place_T, scales)
    return q_THD.contiguous()


def write_kv(
    k_TGD: Tensor, v_TGD: Tensor, k_cache_NGPD: Tensor, v_cache_NGPD: Tensor, place_T: Tensor, scales: KVScales | None
) -> None:
    """Store each token's key and value at place = block * P + offset, in place."""
    if scales is None:
        block_size, dtype = k_cache_NGPD.shape[2], k_cache_NGPD.dtype
        block_T, offset_T = place_T // block_size, place_T % block_size
        k_cache_NGPD[block_T, :, offset_T] = k_TGD.to(dtype)
        v_cache_NGPD[block_T, :, offset_T] = v_TGD.to(dtype)
        return
    counter = scales.saturated_1
    saturated = kv_cache.write(k_TGD, k_cache_NGPD, scales.k_NGP, place_T, counter is not None)
    saturated += kv_cache.write(v_TGD, v_cache_NGPD, scales.v_NGP, place_T, counter is not None)
    if counter is not None:
        counter += saturated


def split_heads(qkv_TX: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views q [T, H, D], k [T, G, D] and v [T, G, D] of a fused projection. Without v it is k."""
    heads_TUD = qkv_TX.unflatten(-1, (-1, head_dim))
    q_THD, k_TGD, v_TGD = heads_TUD.tensor_split((num_heads, num_heads + num_kv_heads), dim=1)
    return q_THD, k_TGD, v_TGD if v_TGD.shape[1] else k_TGD


def without_weight(x: Tensor, eps: float) -> Tensor:
    """Return the heads divided by their root mean square."""
    return rms_norm(x, None, torch.ones_like(x[0, 0]), eps)[0]


ROPE = Op(
    "rope",
    rope,
    (
        Implementation("triton", "ridgeline.kernels.small.rotary.triton_heads:rope", on_gpu),
        Implementation("triton_training", "ridgeline.kernels.small.rotary.triton_training:rope", nowhere),
    ),
)
ROPE_KV = Op(
    "rope_kv",
    rope_kv,
    (
        Implementation("triton", "ridgeline.kernels.small.rotary.triton:rope_kv", on_gpu),
        Implementation("torch", "ridgeline.kernels.small.rotary.torch_ops:rope_kv"),
        Implementation("batch_invariant", "ridgeline.kernels.small.rotary.triton:rope_kv_batch_invariant", on_gpu),
        Implementation("fixed_tiles", "ridgeline.kernels.small.rotary.fixed_tiles:rope_kv", on_cpu),
    ),
)
