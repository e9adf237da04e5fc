"""Paged attention on a CPU that gives a query the same bits, whatever runs beside it, and however its row was cut.

A query attends to the keys that it sees, by a call whose shape follows from their number alone: it is rounded up to a
multiple of `KEYS`, and the last key is repeated there behind a mask. Queries with as many keys run together, each as a
batch entry of its own, which torch's kernel computes one by one.

Legend, beside that of op.py:
    B  queries that run together
    E  heads that share a key head
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ridgeline.kernels.attention.paged.op import RaggedBatch, Softmax
from ridgeline.kernels.attention.paged.torch_ops import by_hand
from ridgeline.kernels.base import kv_cache
from ridgeline.kernels.base.kv_cache import KVScales
from ridgeline.kernels.base.tree import sight

CELLS = 1 << 16  # keys that are gathered at once
# With other numbers the memory of torch's threads is not aligned, and their sums depend on that: a thread of its kernel
# has QUERIES * (keys + 2 + D) numbers of four bytes, which is a multiple of 64 bytes for every even D.
KEYS = 16
QUERIES = 8


class Alike(NamedTuple):
    """Queries that run together, and where the keys lie that they see.

    distance_BK: the positions of the queries minus those of the keys. seen_BK: False for keys that are repeated.
    """

    token_B: Tensor
    block_BK: Tensor
    offset_BK: Tensor
    distance_BK: Tensor
    seen_BK: Tensor


def paged_attention(
    q_THD: Tensor,
    k_cache_NGPD: Tensor,
    v_cache_NGPD: Tensor,
    batch: RaggedBatch,
    softmax: Softmax,
    scales: KVScales | None = None,
) -> Tensor:
    """Compute `op.paged_attention_reference`."""
    scale, softcap, sinks_H, _, window, _ = softmax
    key = "fixed tiles", window, k_cache_NGPD.shape[2]
    if key not in batch.derived:
        batch.derived[key] = list(_alike(batch, k_cache_NGPD.shape[2], window))
    out_THD = torch.empty_like(q_THD)
    for alike in batch.derived[key]:
        k_BGKD = _gathered(k_cache_NGPD, None if scales is None else scales.k_NGP, alike, q_THD.dtype)
        v_BGKD = _gathered(v_cache_NGPD, None if scales is None else scales.v_NGP, alike, q_THD.dtype)
        q_BGED = q_THD[alike.token_B].unflatten(1, (k_BGKD.shape[1], -1))
        gained_BGEK = _gained(alike, softmax, q_BGED)
        if softcap is None and sinks_H is None:
            heads = q_BGED.shape[2]
            room = -heads % QUERIES
            q_BGED, gained_BGEK = pad(q_BGED, (0, 0, 0, room)), pad(gained_BGEK, (0, 0, 0, room))
            out_BGED = scaled_dot_product_attention(q_BGED, k_BGKD, v_BGKD, attn_mask=gained_BGEK, scale=scale)
            out_BGED = out_BGED[:, :, :heads]
        else:
            out_BGED = by_hand(q_BGED, k_BGKD, v_BGKD, gained_BGEK, scale, softcap, sinks_H)
        out_THD[alike.token_B] = out_BGED.flatten(1, 2)
    return out_THD


def _alike(batch: RaggedBatch, block_size: int, window: int | None) -> Iterator[Alike]:
    """Yield the queries of a step by the number of keys that they see."""
    table_SC, device = batch.block_table_SC.cpu().numpy(), batch.block_table_SC.device
    start_R1, end_R, slot_R = (
        x.cpu().numpy().astype(np.int64) for x in (batch.start_R1, batch.kv_len_R, batch.slots_R)
    )
    row_T = np.repeat(np.arange(len(end_R)), np.diff(start_R1))
    place_T = end_R[row_T] - start_R1[1:][row_T] + np.arange(len(row_T))
    first_T = np.zeros_like(place_T) if window is None else np.maximum(place_T - window + 1, 0)
    ahead_T = 0 if batch.ahead_T is None else batch.ahead_T[: len(row_T)].cpu().numpy()
    count_T, keys = place_T + 1 + ahead_T - first_T, dict[int, tuple[np.ndarray, np.ndarray]]()
    if batch.tree is not None:
        bits_T, base_T = (x[: len(row_T)].cpu() for x in batch.tree)
        position_T = batch.tree.positions_T[: len(row_T)].cpu().numpy()
        for token, row in enumerate(row_T):
            seen_K, position_K = (x.numpy() for x in sight(bits_T[token], base_T[token], torch.arange(int(end_R[row]))))
            if window is not None:
                seen_K = seen_K & (position_K > position_T[token] - window)
            keys[token] = np.flatnonzero(seen_K), position_T[token] - position_K[seen_K]
            count_T[token] = len(keys[token][0])
    room_T = -(-count_T // KEYS) * KEYS
    for room in np.unique(room_T).tolist():
        every = np.flatnonzero(room_T == room)
        for token_B in np.array_split(every, -(-len(every) * room // CELLS)):
            rank_BK = np.minimum(np.arange(room), count_T[token_B][:, None] - 1)
            if batch.tree is None:
                key_BK = first_T[token_B][:, None] + rank_BK
                distance_BK = place_T[token_B][:, None] - key_BK
            else:
                chosen = [(keys[token], rank_K) for token, rank_K in zip(token_B, rank_BK, strict=True)]
                key_BK, distance_BK = (np.stack([own[part][rank] for own, rank in chosen]) for part in (0, 1))
            block_BK = table_SC[slot_R[row_T[token_B]][:, None], key_BK // block_size].astype(np.int64)
            seen_BK = np.arange(room) < count_T[token_B][:, None]
            places = token_B, block_BK, key_BK % block_size, distance_BK, seen_BK
            yield Alike(*(torch.from_numpy(each).to(device) for each in places))


def _gathered(cache_NGPD: Tensor, scale_NGP: Tensor | None, alike: Alike, dtype: torch.dtype) -> Tensor:
    """Return the keys (or values) that queries see: [B, G, K, D]."""
    held, where = cache_NGPD.dtype, (alike.block_BK, slice(None), alike.offset_BK)
    if held in kv_cache.LARGEST:  # torch does not index all of these
        cache_NGPD = cache_NGPD.view(torch.uint8)
    found_BKGD = cache_NGPD[where].view(held)
    numbers = kv_cache.numbers(found_BKGD, None if scale_NGP is None else scale_NGP[where], dtype)
    return numbers.transpose(1, 2).contiguous()


def _gained(alike: Alike, softmax: Softmax, q_BGED: Tensor) -> Tensor:
    """Return the gains of logits by distance, and -inf for keys that are not seen: [B, G, E, K]."""
    gained_BHK = torch.zeros_like(alike.distance_BK, dtype=torch.float32)[:, None].expand(
        -1, q_BGED[0, ..., 0].numel(), -1
    )
    if softmax.bias_HL is not None:
        gained_BHK = softmax.bias_HL[:, alike.distance_BK.clamp(0, softmax.bias_HL.shape[1] - 1)].transpose(0, 1)
    elif softmax.slopes_H is not None:
        gained_BHK = -softmax.slopes_H[:, None] * alike.distance_BK.float()[:, None]
    seen_BHK = gained_BHK.masked_fill(~alike.seen_BK[:, None], -torch.inf)
    return seen_BHK.unflatten(1, q_BGED.shape[1:3]).to(q_BGED.dtype)
