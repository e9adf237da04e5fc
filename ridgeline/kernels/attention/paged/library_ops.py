"""Attention over the cache in graphs of torch's compilers. The legend is that of op.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.attention.paged.op import PAGED_ATTENTION, RaggedBatch, Softmax
from ridgeline.kernels.base.library import chosen, dense_like, expect, library_op


@library_op(fake=lambda q_THD, *_: dense_like(q_THD))
def paged_attention(
    q_THD: Tensor,
    k_cache_NGPD: Tensor,
    v_cache_NGPD: Tensor,
    block_table_RC: Tensor,
    start_R1: Tensor,
    kv_len_R: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """Return `op.paged_attention` of plain softmax over caches in the dtype of the queries.

    block_table_RC: block ids by row, int32. start_R1, kv_len_R: as in `RaggedBatch`.
    """
    rows, wide = len(kv_len_R), q_THD.ndim == 3 and k_cache_NGPD.ndim == 4 and block_table_RC.ndim == 2
    fits = wide and k_cache_NGPD.shape == v_cache_NGPD.shape and q_THD.shape[2] == k_cache_NGPD.shape[3]
    fits &= k_cache_NGPD.dtype == v_cache_NGPD.dtype == q_THD.dtype and q_THD.shape[1] % k_cache_NGPD.shape[1] == 0
    fits &= len(block_table_RC) == rows and start_R1.shape == (rows + 1,)
    expect(
        fits, "paged_attention", "queries [T, H, D], equal caches [N, G, P, D], blocks [R, C], starts [R + 1] and "
        "lengths [R]", q_THD, k_cache_NGPD, v_cache_NGPD, block_table_RC, start_R1, kv_len_R,
    )  # fmt: skip
    slots_R = torch.arange(len(kv_len_R), dtype=torch.int32, device=q_THD.device)
    batch = RaggedBatch(
        slots_R=slots_R, block_table_SC=block_table_RC, start_R1=start_R1, kv_len_R=kv_len_R, tokens_each=0,
        num_tokens_R=None,
    )  # fmt: skip
    softmax = Softmax(scale, window=window)
    return chosen(PAGED_ATTENTION, q_THD)(q_THD, k_cache_NGPD, v_cache_NGPD, batch, softmax).contiguous()
