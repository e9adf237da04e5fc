"""Attention over the cache in graphs of torch's compilers. The legend is that of op.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.attention.paged.op import PAGED_ATTENTION, RaggedBatch, Softmax
from ridgeline.kernels.base.library import chosen, dense_like, library_op


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
    slots_R = torch.arange(len(kv_len_R), dtype=torch.int32, device=q_THD.device)
    batch = RaggedBatch(
        slots_R=slots_R, block_table_SC=block_table_RC, start_R1=start_R1, kv_len_R=kv_len_R, tokens_each=0,
        num_tokens_R=None,
    )  # fmt: skip
    softmax = Softmax(scale, window=window)
    return chosen(PAGED_ATTENTION, q_THD)(q_THD, k_cache_NGPD, v_cache_NGPD, batch, softmax).contiguous()
