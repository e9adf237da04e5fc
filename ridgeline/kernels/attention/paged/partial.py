"""Attention to a part of a row's keys, with what is needed to add the parts up: the logarithm of each softmax's sum.

The legend is that of op.py, and:
    N  parts
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.attention.paged.op import RaggedBatch, Softmax
from ridgeline.kernels.base.op import Implementation, Op, on_gpu


def partial_attention(
    q_THD: Tensor,
    k_cache_NGPD: Tensor,
    v_cache_NGPD: Tensor,
    batch: RaggedBatch,
    softmax: Softmax,
    first_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output of `paged_attention`, and the natural logarithms of the softmax's sums: [T, H, D] in q's dtype
    and [T, H] in float32 (float64 if q is).

    A row may have fewer keys than queries. Query i of n sees the first kv_len - n + 1 + i keys. Where that is none, the
    logarithm is -inf and the output is undefined. So are both for tokens of no row.

    softmax: its sinks are left to `merge_attention`, and its window to first_R.
    first_R: the first key that a row's first query sees, for windows. Each further query sees one key less. None: all
        keys from 0 on.

    It is computed in float32, or in q's dtype if that is wider.
    """
    scale, softcap, _, slopes_H, _, bias_HL = softmax
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    out_THD, lse_TH = torch.zeros_like(q_THD), q_THD.new_full(q_THD.shape[:2], -torch.inf, dtype=wide)
    num_kv_heads, block_size, head_dim = k_cache_NGPD.shape[1:]
    per_kv = q_THD.shape[1] // num_kv_heads
    starts, lengths = batch.start_R1.tolist(), batch.kv_len_R.tolist()
    firsts = [0] * len(lengths) if first_R is None else first_R.tolist()
    for row, slot in enumerate(batch.slots_R.tolist()):
        begin, end, length = starts[row], starts[row + 1], lengths[row]
        count, base = end - begin, max(0, firsts[row]) // block_size
        if count <= 0 or length <= base * block_size:
            continue
        blocks = batch.block_table_SC[slot, base : -(-length // block_size)].long()
        k_GKD, v_GKD = (
            cache[blocks].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, : length - base * block_size].to(wide)
            for cache in (k_cache_NGPD, v_cache_NGPD)
        )
        query_Q1 = torch.arange(count, device=q_THD.device)[:, None]
        key_K = torch.arange(base * block_size, length, device=q_THD.device)
        visible_QK = key_K <= length - count + query_Q1
        if first_R is not None:
            visible_QK &= key_K >= firsts[row] + query_Q1
        q_GMD = q_THD[begin:end].to(wide).unflatten(1, (num_kv_heads, per_kv)).permute(1, 2, 0, 3).flatten(1, 2)
        x_HQK = (scale * q_GMD @ k_GKD.transpose(1, 2)).view(-1, count, len(key_K))
        if softcap is not None:
            x_HQK = softcap * torch.tanh(x_HQK / softcap)
        if slopes_H is not None:
            x_HQK = x_HQK + slopes_H[:, None, None] * (key_K - (length - count + query_Q1))
        if bias_HL is not None:
            x_HQK = x_HQK + bias_HL[:, (length - count + query_Q1 - key_K).clamp(0, bias_HL.shape[1] - 1)]
        x_HQK = x_HQK.masked_fill(~visible_QK, -torch.inf)
        lse_HQ = x_HQK.logsumexp(-1)
        weights_HQK = (x_HQK - torch.where(lse_HQ == -torch.inf, 0, lse_HQ)[..., None]).exp()
        seen_GKD = v_GKD.masked_fill(~visible_QK.any(0)[None, :, None], 0)  # never let unwritten memory in
        out_HQD = (weights_HQK.view(num_kv_heads, -1, len(key_K)) @ seen_GKD).view(-1, count, head_dim)
        out_THD[begin:end] = out_HQD.transpose(0, 1).to(q_THD.dtype)
        lse_TH[begin:end] = lse_HQ.T
    return out_THD, lse_TH


def merge_attention(out_NTHD: Tensor, lse_NTH: Tensor, sinks_H: Tensor | None = None) -> Tensor:
    """Return the attention to all parts of the keys, from that to each of them: [T, H, D], contiguous. Queries that see
    nothing get zeros.

    out_NTHD, lse_NTH: what `partial_attention` returns, with any strides but a head's.
    sinks_H: as in `paged_attention`.
    """
    all_NTH = lse_NTH
    if sinks_H is not None:
        all_NTH = torch.cat((lse_NTH, sinks_H.to(lse_NTH.dtype).expand(1, *lse_NTH.shape[1:])))
    total_TH = all_NTH.logsumexp(0)
    weight_NTH1 = (lse_NTH - torch.where(total_TH == -torch.inf, 0, total_TH)).exp()[..., None]
    part_NTHD = torch.where(lse_NTH[..., None] == -torch.inf, 0, weight_NTH1 * out_NTHD)
    return part_NTHD.sum(0).to(out_NTHD.dtype)


PARTIAL_ATTENTION = Op(
    "partial_attention",
    partial_attention,
    (Implementation("triton", "ridgeline.kernels.attention.paged.triton_partial:partial_attention", on_gpu),),
)
MERGE_ATTENTION = Op(
    "merge_attention",
    merge_attention,
    (Implementation("triton", "ridgeline.kernels.attention.paged.triton_partial:merge_attention", on_gpu),),
)
