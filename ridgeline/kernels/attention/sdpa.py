"""Paged attention in plain torch: gather the blocks, then torch's scaled_dot_product_attention.

Rows with one query (decodes) are padded to a common length and run together, longer rows one by one, a tile of queries
at a time, which sees no keys behind its last query. The heads that share a key head are stacked along the query axis,
so grouped queries need no copies of keys. Reads nothing from the device: shapes come from host bounds, lengths enter
through the mask. Keys and values are copied once before they are read: torch's kernel wants a row's keys at even
distances. What does not depend on the layer, blocks and masks, is made once a step.

Legend as in op.py; B rows run together, Q queries of each, K keys gathered, J heads per key head times queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ridgeline.kernels.attention.op import RaggedBatch

WORKSPACE_BYTES = 1 << 28  # bound on gathered keys and values of one pass
TILE = 128  # queries


@dataclass(frozen=True)
class Tile:
    """Queries that attend at once. tokens: which of the step's, as many for each row. keys: those of the pass that any
    of them sees. position_BQ: of the queries; key_K: of the keys. seen_BGJK: bool, G = 1."""

    tokens: slice | Tensor
    keys: slice
    position_BQ: Tensor
    key_K: Tensor
    seen_BGJK: Tensor


class Pass(NamedTuple):
    """Rows whose keys, in blocks_BC, are gathered together."""

    blocks_BC: Tensor
    tiles: list[Tile]


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
    per_kv = q_THD.shape[1] // k_cache_NGPD.shape[1]
    key = window, per_kv, k_cache_NGPD.shape[1:]
    if key not in batch.derived:
        batch.derived[key] = list(_passes(batch, k_cache_NGPD, window, per_kv))
    out_THD = torch.empty_like(q_THD)
    for blocks_BC, tiles in batch.derived[key]:
        k_BGKD, v_BGKD = (_gathered(cache, blocks_BC) for cache in (k_cache_NGPD, v_cache_NGPD))
        for tile in tiles:
            num_rows, num_queries = tile.position_BQ.shape
            q_BQGpD = q_THD[tile.tokens].view(num_rows, num_queries, -1, per_kv, q_THD.shape[-1])
            q_BGJD = q_BQGpD.permute(0, 2, 3, 1, 4).flatten(2, 3)
            keys_values = k_BGKD[:, :, tile.keys], v_BGKD[:, :, tile.keys]
            mask_BGJK = tile.seen_BGJK
            if slopes_H is not None:
                distance_BQK = (tile.position_BQ[..., None] - tile.key_K).float()
                lost_BGJK = (slopes_H.view(1, -1, per_kv, 1, 1) * distance_BQK[:, None, None]).flatten(2, 3)
                mask_BGJK = torch.where(mask_BGJK, -lost_BGJK, -torch.inf).to(q_BGJD.dtype)
            if softcap is None:
                out_BGJD = scaled_dot_product_attention(q_BGJD, *keys_values, attn_mask=mask_BGJK, scale=scale)
            else:
                out_BGJD = _capped(q_BGJD, *keys_values, mask_BGJK, scale, softcap)
            out_BQGpD = out_BGJD.unflatten(2, (per_kv, num_queries)).permute(0, 3, 1, 2, 4)
            out_THD[tile.tokens] = out_BQGpD.reshape(-1, *q_THD.shape[1:])
    return out_THD


def _passes(batch: RaggedBatch, k_cache_NGPD: Tensor, window: int | None, per_kv: int) -> Iterator[Pass]:
    num_tokens_R, kv_bound_R = _known(batch.num_tokens_R), _known(batch.kv_bound_R)
    starts_R, block_size = np.cumsum(num_tokens_R) - num_tokens_R, k_cache_NGPD.shape[2]

    def blocks(least: int, end: int) -> tuple[int, int]:
        """Which blocks queries from position `least` to before `end` see."""
        return 0 if window is None else max(0, least - window + 1) // block_size, -(-end // block_size)

    def tile(tokens: slice | Tensor, position_BQ: Tensor, least: int, end: int, base: int) -> Tile:
        """base: the pass's first block."""
        first, last = blocks(least, end)
        key_K = torch.arange(first * block_size, last * block_size, device=position_BQ.device)
        seen_BQK = key_K <= position_BQ[..., None]
        if window is not None:
            seen_BQK &= key_K > position_BQ[..., None] - window
        keys = slice((first - base) * block_size, (last - base) * block_size)
        return Tile(tokens, keys, position_BQ, key_K, seen_BQK[:, None].repeat(1, 1, per_kv, 1))

    for rows in _decode_rows(num_tokens_R, kv_bound_R, k_cache_NGPD):
        everything = len(rows) == len(num_tokens_R) == int(num_tokens_R.sum())
        device = batch.slots_R.device
        which = slice(None) if everything else torch.from_numpy(rows).to(device)
        tokens = slice(None) if everything else torch.from_numpy(starts_R[rows]).to(device)
        least, end = int(kv_bound_R[rows].min()) - 1, int(kv_bound_R[rows].max())
        first, last = blocks(least, end)
        table_BC = batch.block_table_SC[:, first:last][batch.slots_R[which]]
        yield Pass(table_BC, [tile(tokens, batch.kv_len_R[which, None] - 1, least, end, first)])
    for row in np.flatnonzero(num_tokens_R > 1).tolist():
        start, count, end = int(starts_R[row]), int(num_tokens_R[row]), int(kv_bound_R[row])
        least = end - count
        first, last = blocks(least, end)
        position_1Q = batch.kv_len_R[row] - count + torch.arange(count, device=batch.slots_R.device)[None]
        cuts = [(at, min(at + TILE, count)) for at in range(0, count, TILE)]
        yield Pass(
            batch.block_table_SC[:, first:last][batch.slots_R[row : row + 1]],
            [tile(slice(start + a, start + b), position_1Q[:, a:b], least + a, least + b, first) for a, b in cuts],
        )


def _known(lengths: np.ndarray | None) -> np.ndarray:
    if lengths is None:
        raise ValueError("this attention sizes its work on the host and needs the host's lengths")
    return lengths


def _decode_rows(num_tokens_R: np.ndarray, kv_bound_R: np.ndarray, k_cache_NGPD: Tensor) -> list[np.ndarray]:
    """Rows with one query, split so that a pass's gathered keys and values stay within the workspace."""
    rows = np.flatnonzero(num_tokens_R == 1)
    if not len(rows):
        return []
    _, kv_heads, block_size, head_dim = k_cache_NGPD.shape
    row_bytes = 4 * (int(kv_bound_R[rows].max()) + block_size) * kv_heads * head_dim * k_cache_NGPD.element_size()
    return np.array_split(rows, -(-len(rows) // max(1, WORKSPACE_BYTES // row_bytes)))


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
