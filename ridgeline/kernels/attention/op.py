"""Paged attention over a ragged batch: write new keys and values, then attend to everything cached.

Legend: T tokens of the step, R rows, S slots, N cache blocks, P tokens per block, H query heads, G key/value heads,
D head dim, C columns of the block table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ridgeline.kernels.op import Implementation, Op


@dataclass(frozen=True, kw_only=True)
class RaggedBatch:
    """Which queries the rows bring and where their keys lie.

    Device: slots_R; block_table_SC (block ids by slot); start_R1 (first query of each row, then T); kv_len_R (tokens in
    the cache after this step's were written). Host: num_tokens_R, and kv_bound_R ≥ kv_len_R to size work by.
    A row's queries are its last num_tokens positions.
    """

    slots_R: Tensor
    block_table_SC: Tensor
    start_R1: Tensor
    kv_len_R: Tensor
    num_tokens_R: np.ndarray
    kv_bound_R: np.ndarray


def write_kv_reference(
    k_TGD: Tensor, v_TGD: Tensor, k_cache_NGPD: Tensor, v_cache_NGPD: Tensor, place_T: Tensor
) -> None:
    """Store each token's key and value at place = block * P + offset, in place."""
    block_size = k_cache_NGPD.shape[2]
    block_T, offset_T = place_T // block_size, place_T % block_size
    k_cache_NGPD[block_T, :, offset_T] = k_TGD
    v_cache_NGPD[block_T, :, offset_T] = v_TGD


def paged_attention_reference(
    q_THD: Tensor,
    k_cache_NGPD: Tensor,
    v_cache_NGPD: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ + mask) v for every row on its own, in float32. Returns [T, H, D] in q's dtype.

    A query at position p sees positions max(0, p - window + 1) … p.
    """
    out_THD = torch.empty_like(q_THD)
    num_kv_heads, block_size, head_dim = k_cache_NGPD.shape[1:]
    heads_per_kv = q_THD.shape[1] // num_kv_heads
    starts, lengths = batch.start_R1.tolist(), batch.kv_len_R.tolist()
    for row, slot in enumerate(batch.slots_R.tolist()):
        length, first, last = lengths[row], starts[row], starts[row + 1]
        blocks = batch.block_table_SC[slot, : -(-length // block_size)].long()
        k_GLD = k_cache_NGPD[blocks].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :length].float()
        v_GLD = v_cache_NGPD[blocks].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :length].float()
        position_Q = torch.arange(length - (last - first), length, device=q_THD.device)[:, None]
        key_L = torch.arange(length, device=q_THD.device)[None, :]
        visible_QL = key_L <= position_Q
        if window is not None:
            visible_QL &= key_L > position_Q - window
        k_HLD, v_HLD = (x.repeat_interleave(heads_per_kv, dim=0) for x in (k_GLD, v_GLD))
        scores_HQL = scale * q_THD[first:last].float().transpose(0, 1) @ k_HLD.transpose(1, 2)
        weights_HQL = scores_HQL.masked_fill(~visible_QL, -torch.inf).softmax(-1)
        seen_HLD = v_HLD.masked_fill(~visible_QL.any(0)[None, :, None], 0)  # never let unwritten memory in
        out_THD[first:last] = (weights_HQL @ seen_HLD).transpose(0, 1).to(q_THD.dtype)
    return out_THD


@dataclass(frozen=True, kw_only=True)
class Case:
    """(new tokens, tokens in the cache after them) per row, and the shape of the attention."""

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    window: int | None = None


CASES = (
    Case(rows=((1, 1),)),
    Case(rows=((1, 17), (1, 5), (1, 64))),
    Case(rows=((7, 7), (16, 33), (1, 20))),
    Case(rows=((40, 100), (1, 90), (1, 1)), block_size=4),
    Case(rows=((40, 100), (1, 90), (33, 33)), window=12),
    Case(rows=((1, 70), (1, 13), (1, 200)), window=16, num_heads=8, num_kv_heads=8),
    Case(rows=((5, 300), (1, 257)), num_heads=8, num_kv_heads=1, head_dim=64, block_size=32),
)


def make_case(case: Case, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple:
    """Random (q_THD, k_cache, v_cache, batch) for a case: rows in shuffled slots, blocks scattered over the cache."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, size = len(case.rows), case.block_size
    columns = max(-(-kv // size) for _, kv in case.rows)
    num_blocks = 1 + num_rows * columns
    table_SC = torch.zeros(num_rows, columns, dtype=torch.int32)
    order = 1 + torch.randperm(num_rows * columns, generator=generator).to(torch.int32)
    slots = torch.randperm(num_rows, generator=generator)
    for row, (_, kv) in enumerate(case.rows):
        used = -(-kv // size)
        table_SC[slots[row], :used] = order[row * columns : row * columns + used]
    shape = (num_blocks, case.num_kv_heads, size, case.head_dim)
    counts = [new for new, _ in case.rows]
    q_THD = torch.randn(sum(counts), case.num_heads, case.head_dim, generator=generator)
    k, v = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    lengths = [kv for _, kv in case.rows]
    batch = RaggedBatch(
        slots_R=slots.to(device),
        block_table_SC=table_SC.to(device),
        start_R1=torch.tensor([0, *np.cumsum(counts).tolist()], device=device),
        kv_len_R=torch.tensor(lengths, device=device),
        num_tokens_R=np.array(counts, np.int32),
        kv_bound_R=np.array(lengths, np.int32),
    )
    return (*(x.to(device, dtype) for x in (q_THD, k, v)), batch)


WRITE_KV = Op("write_kv", write_kv_reference)
PAGED_ATTENTION = Op(
    "paged_attention",
    paged_attention_reference,
    (Implementation("sdpa", "ridgeline.kernels.attention.sdpa:paged_attention"),),
)
