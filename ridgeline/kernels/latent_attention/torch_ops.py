"""Latent attention in plain torch: each row's vectors are gathered once, and serve as keys and as values.

All heads read the same vectors, so a row is two products of a matrix with heads and queries as its rows, however many
there are. Long rows are cut into tiles of queries, which see no keys behind their last query. What does not depend on
the layer (blocks, and what is seen) is made once a step.

Legend, beside that of op.py:
    B  blocks of a row
    M  queries of all heads: H times Q
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.attention.op import RaggedBatch
from ridgeline.kernels.tree import sight

TILE = 64  # queries of a tile


class Tile(NamedTuple):
    """Queries that attend at once.

    keys: so many keys of the row, from the first, may be seen. seen_QJ: which are; None: all, by every query.
    """

    tokens: slice
    keys: int
    seen_QJ: Tensor | None


class Row(NamedTuple):
    """A row with queries: the blocks that it reads, and its tiles. unseen_J: keys among them that no query sees."""

    blocks_B: Tensor
    tiles: list[Tile]
    unseen_J: Tensor | None


def latent_attention(q_THL: Tensor, q_THY: Tensor, cache_NPW: Tensor, batch: RaggedBatch, *, scale: float) -> Tensor:
    """Compute `op.latent_attention_reference`."""
    key = "latents", cache_NPW.shape[1]
    if key not in batch.derived:
        batch.derived[key] = list(_rows(batch, cache_NPW.shape[1]))
    tokens, heads, rank = q_THL.shape
    out_THL = q_THL.new_empty(tokens, heads, rank)
    for row in batch.derived[key]:
        kept_JW = cache_NPW.index_select(0, row.blocks_B).flatten(0, 1)
        if row.unseen_J is not None:  # a mask alone would not do: 0 · NaN is NaN
            kept_JW[row.unseen_J] = 0
        for tile in row.tiles:
            q_MW = torch.cat((q_THL[tile.tokens], q_THY[tile.tokens]), dim=-1).flatten(0, 1)
            seen_JW = kept_JW[: tile.keys]
            scores_MJ = (q_MW @ seen_JW.T).float().mul_(scale)
            if tile.seen_QJ is not None:
                scores_MJ.unflatten(0, (-1, heads)).masked_fill_(~tile.seen_QJ[:, None], -torch.inf)
            weights_MJ = scores_MJ.softmax(-1).to(kept_JW.dtype)
            out_THL[tile.tokens] = (weights_MJ @ seen_JW[:, :rank]).unflatten(0, (-1, heads)).to(q_THL.dtype)
    return out_THL


def _rows(batch: RaggedBatch, block_size: int) -> Iterator[Row]:
    starts, lengths = batch.start_R1.tolist(), batch.kv_len_R.tolist()
    for index, slot in enumerate(batch.slots_R.tolist()):
        first, last, length = starts[index], starts[index + 1], lengths[index]
        if first == last:
            continue
        blocks_B = batch.block_table_SC[slot, : -(-length // block_size)].long()
        before = length - (last - first)
        tiles, used = list[Tile](), torch.zeros(len(blocks_B) * block_size, dtype=torch.bool)
        for start in range(first, last, TILE):
            end = min(last, start + TILE)
            keys = before + end - first
            place_Q1, key_1J = torch.arange(before + start - first, keys)[:, None], torch.arange(keys)[None]
            seen_QJ = key_1J <= place_Q1
            if batch.tree is not None:
                bits_T, base_T = batch.tree
                seen_QJ, _ = sight(bits_T[start:end, None], base_T[start:end, None], key_1J)
            used[:keys] |= seen_QJ.any(0)
            tiles.append(Tile(slice(start, end), keys, None if seen_QJ.all() else seen_QJ))
        yield Row(blocks_B, tiles, None if used.all() else (~used).nonzero()[:, 0])
