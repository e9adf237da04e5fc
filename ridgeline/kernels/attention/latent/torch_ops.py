"""Latent attention in plain torch: vectors are gathered once, and serve as keys and as values.

All heads read the same vectors, so a row is two products of a matrix with heads and queries as its rows, however many
there are. Long rows are cut into tiles of queries, which see no keys behind their last query, and long contexts into
stretches of keys, so that neither scores nor gathered vectors grow with them. The results of stretches are combined by
the maxima and sums of their softmaxes.

Legend, beside that of op.py:
    B  blocks of a row
    M  queries of all heads of a tile: H times Q
    J  keys of a stretch
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.attention.latent.op import LatentCache, kept, tokens_held
from ridgeline.kernels.attention.paged.op import RaggedBatch
from ridgeline.kernels.base.tree import Tree, sight

QUERIES = 1024  # of a tile, all heads counted
SCORES = 1 << 22  # numbers of a stretch's scores
GATHERED_BYTES = 1 << 24  # of the vectors of a stretch


class Row(NamedTuple):
    """A row with queries: its tokens, the keys behind them, and the blocks that it reads."""

    first: int
    last: int
    length: int
    blocks_B: Tensor


def latent_attention(q_THL: Tensor, q_THY: Tensor, cache: LatentCache, batch: RaggedBatch, *, scale: float) -> Tensor:
    """Compute `op.latent_attention_reference`."""
    tokens, heads, rank = q_THL.shape
    out_THL = q_THL.new_empty(tokens, heads, rank)
    step = max(1, QUERIES // heads)
    for row in rows_of(batch, tokens_held(cache)):
        for start in range(row.first, row.last, step):
            tile = slice(start, min(row.last, start + step))
            q_MW = torch.cat((q_THL[tile], q_THY[tile]), dim=-1).flatten(0, 1) * scale
            found_ML = _attended(q_MW, cache, row, tile, rank, batch.tree)
            out_THL[tile] = found_ML.unflatten(0, (-1, heads)).to(q_THL.dtype)
    return out_THL


def rows_of(batch: RaggedBatch, block_size: int) -> list[Row]:
    """Return the step's rows with queries, which its layers share."""
    key = "latents", block_size
    if key in batch.derived:
        kept: list[Row] = batch.derived[key]
        return kept
    starts, lengths = batch.start_R1.tolist(), batch.kv_len_R.tolist()
    found: list[Row] = []
    for index, slot in enumerate(batch.slots_R.tolist()):
        first, last, length = starts[index], starts[index + 1], lengths[index]
        if first < last:
            found.append(Row(first, last, length, batch.block_table_SC[slot, : -(-length // block_size)].long()))
    batch.derived[key] = found
    return found


def _attended(q_MW: Tensor, cache: LatentCache, row: Row, tile: slice, rank: int, tree: Tree | None) -> Tensor:
    """Return the attention of a tile's queries, the weighted sums of latents: [M, L]."""
    block_size, token_bytes = tokens_held(cache), q_MW.shape[1] * q_MW.element_size()
    before = row.length - (row.last - tile.start)
    keys = before + tile.stop - tile.start
    each = min(SCORES // len(q_MW), GATHERED_BYTES // token_bytes) // block_size * block_size or block_size
    best_M1 = sum_M1 = acc_ML = q_MW.new_zeros(())
    for start in range(0, keys, each):
        end = min(keys, start + each)
        blocks_B = row.blocks_B[start // block_size : -(-end // block_size)]
        if isinstance(cache, Tensor):
            kept_JW = cache.index_select(0, blocks_B)
        else:
            kept_JW = torch.cat(kept(cache, (blocks_B,), rank, q_MW.dtype), -1)
        kept_JW = kept_JW.flatten(0, 1)[: end - start]
        seen_QJ = _seen(tile, before, start, end, tree)
        if tree is not None and seen_QJ is not None:
            kept_JW[~seen_QJ.any(0)] = 0  # a mask alone would not do: 0 · NaN is NaN
        scores_MJ = (q_MW @ kept_JW.T).float()
        if seen_QJ is not None:
            scores_MJ.unflatten(0, (len(seen_QJ), -1)).masked_fill_(~seen_QJ[:, None], -torch.inf)
        if each >= keys:
            return scores_MJ.softmax(-1).to(kept_JW.dtype) @ kept_JW[:, :rank]
        top_M1 = scores_MJ.amax(-1, keepdim=True)
        if start:
            top_M1 = torch.maximum(top_M1, best_M1)
            factor_M1 = (best_M1 - top_M1).exp_()
            sum_M1, acc_ML = sum_M1 * factor_M1, acc_ML * factor_M1
        weights_MJ = scores_MJ.sub_(top_M1).exp_()
        best_M1, sum_M1 = top_M1, sum_M1 + weights_MJ.sum(-1, keepdim=True)
        acc_ML = acc_ML + (weights_MJ.to(kept_JW.dtype) @ kept_JW[:, :rank]).float()
    return acc_ML / sum_M1


def _seen(tile: slice, before: int, start: int, end: int, tree: Tree | None) -> Tensor | None:
    """Return True where a tile's query sees a key of a stretch: [Q, J], or None if all see all."""
    if tree is None and end <= before + 1:
        return None
    key_1J = torch.arange(start, end)[None]
    if tree is not None:
        return sight(tree.bits_T[tile, None], tree.base_T[tile, None], key_1J)[0]
    return key_1J <= torch.arange(before, before + tile.stop - tile.start)[:, None]
