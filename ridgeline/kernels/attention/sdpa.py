"""Paged attention in plain torch: gather the blocks, then torch's scaled_dot_product_attention.

Rows with one query (decodes) are padded to a common length and run together, longer rows one by one. The heads that
share a key head are stacked along the query axis, so grouped queries need no copies of keys. Reads nothing from the
device: shapes come from host bounds, lengths enter through the mask. Keys and values are copied once before they are
read: torch's kernel wants a row's keys at even distances.

Legend as in op.py; B rows run together, K keys gathered, J heads per key head times queries.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ridgeline.kernels.attention.op import RaggedBatch

WORKSPACE_BYTES = 1 << 28  # bound on gathered keys and values of one pass


def paged_attention(
    q_THD: Tensor,
    k_cache_NGPD: Tensor,
    v_cache_NGPD: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    slopes_H: Tensor | None = None,
) -> Tensor:
    """As `op.paged_attention_reference`, but for sinks. Cache memory must be finite where unwritten (it is zeroed)."""
    caches = k_cache_NGPD, v_cache_NGPD
    attend = partial(_attend, scale=scale, window=window, softcap=softcap, slopes_H=slopes_H)
    num_tokens_R, kv_bound_R = _known(batch.num_tokens_R), _known(batch.kv_bound_R)
    starts_R = np.concatenate([[0], np.cumsum(num_tokens_R)])
    out_THD = torch.empty_like(q_THD)
    for rows in _decode_passes(batch, k_cache_NGPD, window):
        tokens = starts_R[rows]
        if len(rows) == len(q_THD):  # the whole step is one pass of decodes
            return attend(q_THD[:, None], caches, batch, slice(None), kv_bound_R)[:, 0]
        index = torch.from_numpy(tokens).to(q_THD.device)
        where = torch.from_numpy(rows).to(q_THD.device)
        out_THD[index] = attend(q_THD[index][:, None], caches, batch, where, kv_bound_R[rows])[:, 0]
    for row in np.flatnonzero(num_tokens_R > 1):
        part = slice(int(starts_R[row]), int(starts_R[row + 1]))
        one = slice(int(row), int(row) + 1)
        out_THD[part] = attend(q_THD[None, part], caches, batch, one, kv_bound_R[one])[0]
    return out_THD


def _known(lengths: np.ndarray | None) -> np.ndarray:
    if lengths is None:
        raise ValueError("this attention sizes its work on the host and needs the host's lengths")
    return lengths


def _decode_passes(batch: RaggedBatch, k_cache_NGPD: Tensor, window: int | None) -> list[np.ndarray]:
    """Rows with one query, split so that a pass's gathered keys and values stay within the workspace."""
    rows = np.flatnonzero(_known(batch.num_tokens_R) == 1)
    if not len(rows):
        return []
    _, kv_heads, block_size, head_dim = k_cache_NGPD.shape
    longest = int(_known(batch.kv_bound_R)[rows].max())
    row_bytes = 4 * (longest + block_size) * kv_heads * head_dim * k_cache_NGPD.element_size()
    return np.array_split(rows, -(-len(rows) // max(1, WORKSPACE_BYTES // row_bytes)))


def _attend(
    q_BQHD: Tensor,
    caches: tuple[Tensor, Tensor],
    batch: RaggedBatch,
    rows: slice | Tensor,
    kv_bound_B: np.ndarray,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    slopes_H: Tensor | None,
) -> Tensor:
    """Attention of B rows with Q queries each, keys padded to the longest."""
    num_rows, num_queries, num_heads, head_dim = q_BQHD.shape
    _, kv_heads, block_size, _ = caches[0].shape
    first = 0 if window is None else max(0, int(kv_bound_B.min()) - num_queries - window + 1) // block_size
    last = -(-int(kv_bound_B.max()) // block_size)
    blocks_BC = batch.block_table_SC[:, first:last][batch.slots_R[rows]]
    k_BGKD, v_BGKD = (_gathered(cache, blocks_BC) for cache in caches)
    position_BQ = batch.kv_len_R[rows, None] - num_queries + torch.arange(num_queries, device=q_BQHD.device)
    key_K = torch.arange(first * block_size, last * block_size, device=q_BQHD.device)
    visible_BQK = key_K <= position_BQ[..., None]
    if window is not None:
        visible_BQK &= key_K > position_BQ[..., None] - window
    per_kv = num_heads // kv_heads
    q_BGJD = q_BQHD.view(num_rows, num_queries, kv_heads, per_kv, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask_BGJK = visible_BQK[:, None].repeat(1, 1, per_kv, 1)
    if slopes_H is not None:
        distance_BQK = (position_BQ[..., None] - key_K).float()
        lost_BGJK = (slopes_H.view(1, kv_heads, per_kv, 1, 1) * distance_BQK[:, None, None]).flatten(2, 3)
        mask_BGJK = torch.where(mask_BGJK, -lost_BGJK, -torch.inf).to(q_BGJD.dtype)
    if softcap is None:
        out_BGJD = scaled_dot_product_attention(q_BGJD, k_BGKD, v_BGKD, attn_mask=mask_BGJK, scale=scale)
    else:
        out_BGJD = _capped(q_BGJD, k_BGKD, v_BGKD, mask_BGJK, scale, softcap)
    return out_BGJD.unflatten(2, (per_kv, num_queries)).permute(0, 3, 1, 2, 4).reshape(q_BQHD.shape)


def _gathered(cache_NGPD: Tensor, blocks_BC: Tensor) -> Tensor:
    """The keys (or values) of some blocks, each row's beside each other: [B, G, C * P, D]; a block is copied in one
    piece where its tokens' heads lie together in the cache."""
    blocks = cache_NGPD.transpose(1, 2).index_select(0, blocks_BC.flatten())
    return blocks.view(len(blocks_BC), -1, *blocks.shape[2:]).transpose(1, 2)


def _capped(q_BGJD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, mask_BGJK: Tensor, scale: float, softcap: float) -> Tensor:
    """Attention whose logits are capped, which torch's has no place for. mask: what is seen, or added to the logits."""
    x_BGJK = softcap * torch.tanh(q_BGJD.float() @ k_BGKD.float().transpose(-1, -2) * (scale / softcap))
    bool_mask = mask_BGJK.dtype == torch.bool
    x_BGJK = x_BGJK.masked_fill(~mask_BGJK, -torch.inf) if bool_mask else x_BGJK + mask_BGJK
    return (x_BGJK.softmax(-1).to(v_BGKD.dtype) @ v_BGKD).to(q_BGJD.dtype)
