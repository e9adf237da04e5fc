"""Multi-head latent attention over a paged cache of latent vectors (DeepSeek-V2, arXiv 2405.04434, section 2.1).

All heads read the same vectors, as keys and as values: the first L numbers of a vector are its value, and all of them
its key. Queries come multiplied by the heads' projections of keys, and results go to those of values.

Latents may be cached as levels of 8 bits with a scale for each token (kernels/base/kv_format.py). Rotated parts keep
the dtype of activations: they are a ninth of a vector, and what the positions of tokens decide is in them.

Legend:
    T  tokens of the step
    R  rows
    N  cache blocks
    P  tokens per block
    H  query heads
    L  width of a latent
    K  width of a query's part that is not rotated
    Y  width of the rotated part
    W  L + Y, the numbers that are kept of a token
    Z  rows of the table of angles, one for each position
    Q  queries of one row
    J  keys of one row
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.attention.paged.op import RaggedBatch
from ridgeline.kernels.base.kv_cache import levels, row_scales
from ridgeline.kernels.base.op import Implementation, Op, on_cpu, on_gpu
from ridgeline.kernels.base.tree import sight

ITEM_QUERIES = 64  # tokens times heads that a program attends with at most (`attention_schedule`)


class LatentLevels(NamedTuple):
    """Cached vectors whose latents are levels of 8 bits. The blocks of each part may have a stride of their own.

    latent_NPL: the levels.
    rotated_NPY: the rotated parts, in the dtype of activations.
    scale_NP: what the levels of a token are multiplied by, bfloat16.
    """

    latent_NPL: Tensor
    rotated_NPY: Tensor
    scale_NP: Tensor


LatentCache = Tensor | LatentLevels  # [N, P, W] in the dtype of activations, or levels


def tokens_held(cache: LatentCache) -> int:
    """Return the tokens of a block."""
    return int((cache if isinstance(cache, Tensor) else cache.latent_NPL).shape[1])


def kept(cache: LatentCache, at: tuple[Tensor, ...], rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the latents and the rotated parts of some blocks, or of some tokens by block and offset: [..., L] and
    [..., Y] in this dtype. A number of a level times its scale is rounded once."""
    if isinstance(cache, Tensor):
        vectors = cache[at].to(dtype)
        return vectors[..., :rank], vectors[..., rank:]
    latent_NPL, rotated_NPY, scale_NP = cache
    found = latent_NPL.view(torch.uint8)[at].view(latent_NPL.dtype).to(dtype)  # torch cannot index all of these types
    return found.mul_(scale_NP[at][..., None]), rotated_NPY[at].to(dtype)


def latent_kv_reference(
    q_THX: Tensor,
    latent_TW: Tensor,
    weight_L: Tensor,
    eps: float,
    cos_sin_ZY: Tensor,
    positions_T: Tensor,
    interleaved: bool,
    cache: LatentCache,
    place_T: Tensor,
) -> Tensor:
    """Store rms(c) · weight beside the rotated r of every token, and return the rotated parts of the queries: dense
    [T, H, Y] in q's dtype.

    q_THX: [T, H, K + Y], the rotated part last. It may be a view of wider rows.
    latent_TW: c and r beside each other, [T, L + Y]. It may be a view of wider rows.
    cos_sin_ZY: float32 [Z, Y], cosines then sines.
    interleaved: numbers 2 i and 2 i + 1 rotate as a pair, and otherwise i and Y / 2 + i. Results have the latter order
        in both cases.
    cache: takes the vectors. Its blocks may have a stride of their own.
    place_T: block * P + offset, for every token.
    """
    kept_TW, q_THY = prepared(q_THX, latent_TW, weight_L, eps, cos_sin_ZY, positions_T, interleaved)
    at = place_T.long() // tokens_held(cache), place_T.long() % tokens_held(cache)
    if isinstance(cache, Tensor):
        cache[at] = kept_TW.to(cache.dtype)
        return q_THY
    latent_NPL, rotated_NPY, scale_NP = cache
    c_TL, rotated_NPY[at] = kept_TW[:, : len(weight_L)], kept_TW[:, len(weight_L) :].to(rotated_NPY.dtype)
    scale_T = scale_NP[at] = row_scales(c_TL, latent_NPL.dtype)
    latent_NPL.view(torch.uint8)[at] = levels(c_TL, scale_T, latent_NPL.dtype).view(torch.uint8)
    return q_THY


def prepared(
    q_THX: Tensor,
    latent_TW: Tensor,
    weight_L: Tensor,
    eps: float,
    cos_sin_ZY: Tensor,
    positions_T: Tensor,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Return (the vectors that are kept, [T, L + Y]; the rotated parts of the queries, [T, H, Y]). Differentiable."""
    width, rank = cos_sin_ZY.shape[1], weight_L.shape[0]
    c_TL, r_TY = latent_TW.split((rank, width), dim=-1)
    c = c_TL.float()
    normed_TL = (c * torch.rsqrt(c.square().mean(-1, keepdim=True) + eps) * weight_L.float()).to(c_TL.dtype)
    angles_T1Y = cos_sin_ZY[positions_T.long()][:, None]
    r_T1Y = rotated(r_TY[:, None], angles_T1Y, interleaved)
    q_THY = rotated(q_THX[..., -width:], angles_T1Y, interleaved)
    return torch.cat((normed_TL, r_T1Y[:, 0]), dim=-1), q_THY


def rotated(x_THY: Tensor, cos_sin_T1Y: Tensor, interleaved: bool) -> Tensor:
    """Return vectors that are rotated by the angles of their tokens, in the dtype of x."""
    x, (cos, sin) = x_THY.float(), cos_sin_T1Y.chunk(2, dim=-1)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_THY.dtype)


def latent_attention_reference(
    q_THL: Tensor, q_THY: Tensor, cache: LatentCache, batch: RaggedBatch, *, scale: float
) -> Tensor:
    """Return softmax(scale · (q c + q' r) + mask) c for every row on its own, computed in float32: dense [T, H, L] in
    q's dtype. Every query sees all that is cached of its row up to its own position; with a tree, none of these keys
    from its base on but those in its bits.

    q_THL: queries against the latents. q_THY: their rotated parts.
    cache: the latents and the rotated parts of keys.

    Cells that no query sees never influence the result, NaN and inf included, as in `attention.op.RaggedBatch`.
    """
    return partial_latent_attention(q_THL, q_THY, cache, batch, scale=scale)[0]


def partial_latent_attention(
    q_THL: Tensor, q_THY: Tensor, cache: LatentCache, batch: RaggedBatch, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output of `latent_attention`, and the natural logarithms of the softmax's sums: [T, H, L] in q's dtype
    and [T, H] in float32 (float64 if q is).

    A row may have fewer keys than queries. Query i of n sees the first kv_len - n + 1 + i keys. Where that is none, the
    logarithm is -inf and the output is undefined. So are both for tokens of no row. `merge_attention` adds parts up.
    """
    wide = torch.promote_types(q_THL.dtype, torch.float32)
    out_THL = torch.zeros_like(q_THL, memory_format=torch.contiguous_format)
    lse_TH = q_THL.new_full(q_THL.shape[:2], -torch.inf, dtype=wide)
    rank, block_size = q_THL.shape[-1], tokens_held(cache)
    starts, lengths = batch.start_R1.tolist(), batch.kv_len_R.tolist()
    for row, slot in enumerate(batch.slots_R.tolist()):
        length, first, last = lengths[row], starts[row], starts[row + 1]
        if first == last or length <= 0:
            continue
        blocks = batch.block_table_SC[slot, : -(-length // block_size)].long()
        kept_JW = torch.cat(kept(cache, (blocks,), rank, wide), -1).flatten(0, 1)[:length]
        position_Q1 = torch.arange(length - (last - first), length, device=q_THL.device)[:, None]
        key_QJ = torch.arange(length, device=q_THL.device)[None, :]
        visible_QJ = key_QJ <= position_Q1
        if batch.tree is not None:
            bits_T, base_T = batch.tree.bits_T[first:last, None], batch.tree.base_T[first:last, None]
            visible_QJ, _ = sight(bits_T, base_T, key_QJ)
        kept_JW = kept_JW.masked_fill(~visible_QJ.any(0)[:, None], 0)  # never let unwritten memory in
        q_HQW = torch.cat((q_THL[first:last], q_THY[first:last]), dim=-1).to(wide).transpose(0, 1)
        scores_HQJ = (scale * q_HQW @ kept_JW.T).masked_fill(~visible_QJ, -torch.inf)
        lse_HQ = scores_HQJ.logsumexp(-1)
        weights_HQJ = (scores_HQJ - torch.where(lse_HQ == -torch.inf, 0, lse_HQ)[..., None]).exp()
        out_THL[first:last] = (weights_HQJ @ kept_JW[:, :rank]).transpose(0, 1).to(q_THL.dtype)
        lse_TH[first:last] = lse_HQ.T
    return out_THL, lse_TH


LATENT_KV = Op(
    "latent_kv",
    latent_kv_reference,
    (Implementation("triton", "ridgeline.kernels.attention.latent.triton_kv:latent_kv", on_gpu),),
)

LATENT_ATTENTION = Op(
    "latent_attention",
    latent_attention_reference,
    (
        Implementation("triton", "ridgeline.kernels.attention.latent.triton:latent_attention", on_gpu),
        Implementation("torch", "ridgeline.kernels.attention.latent.torch_ops:latent_attention", on_cpu),
    ),
    matrix=True,
)

PARTIAL_LATENT_ATTENTION = Op(
    "partial_latent_attention",
    partial_latent_attention,
    (Implementation("triton", "ridgeline.kernels.attention.latent.triton:partial_latent_attention", on_gpu),),
)
