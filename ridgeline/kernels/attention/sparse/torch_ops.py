"""Attention to chosen tokens in plain torch, for tiles of a row's queries, so that neither scores nor gathered vectors
grow with the step. The legend is that of op.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.attention.latent.torch_ops import Row, rows_of
from ridgeline.kernels.attention.paged.op import RaggedBatch
from ridgeline.kernels.attention.sparse.op import IndexCache, best, index_scores, sees

SCORES = 1 << 22  # numbers of a tile's scores, all heads of the indexer counted
GATHERED = 1 << 22  # numbers of the vectors that are gathered for a tile


def index_topk(q_TID: Tensor, weights_TI: Tensor, cache: IndexCache, batch: RaggedBatch, *, count: int) -> Tensor:
    """Compute `op.index_topk_reference`."""
    chosen_TK = torch.full((len(q_TID), count), -1, dtype=torch.int32, device=q_TID.device)
    for row in rows_of(batch, cache.keys_NPD.shape[1]):
        key_JD = cache.of(row.blocks_B)[: row.length]
        for tile in _tiles(row, max(1, SCORES // (q_TID.shape[1] * row.length))):
            seen_QJ = sees(tile, row.length - (row.last - tile.start), row.length, batch.tree, q_TID.device)
            if row.length > count:
                chosen_QJ = best(index_scores(q_TID[tile], weights_TI[tile], key_JD), seen_QJ, count)
            else:
                chosen_QJ = seen_QJ
            query_j, place_j = chosen_QJ.nonzero(as_tuple=True)
            column_j = (chosen_QJ.cumsum(1) - 1)[query_j, place_j]
            chosen_TK[tile][query_j, column_j] = place_j.int()
    return chosen_TK


def sparse_attention(
    q_THL: Tensor, q_THY: Tensor, cache_NPW: Tensor, batch: RaggedBatch, chosen_TK: Tensor, *, scale: float
) -> Tensor:
    """Compute `op.sparse_attention_reference`."""
    out_THL = torch.empty_like(q_THL, memory_format=torch.contiguous_format)
    rank, (_, block_size, width) = q_THL.shape[2], cache_NPW.shape
    q_THW = torch.cat((q_THL, q_THY), dim=-1) * scale
    for row in rows_of(batch, block_size):
        most = min(row.length, chosen_TK.shape[1])  # places come first, and no token has more
        for tile in _tiles(row, max(1, GATHERED // (most * width))):
            place_QK = chosen_TK[tile, :most].long()
            none_QK = place_QK < 0
            place_QK = place_QK.clamp_(min=0)
            kept_QKW = cache_NPW[row.blocks_B[place_QK // block_size], place_QK % block_size]
            kept_QKW[none_QK] = 0  # a mask alone would not do: 0 · NaN is NaN
            scores_QHK = (q_THW[tile] @ kept_QKW.mT).float().masked_fill_(none_QK[:, None], -torch.inf)
            weights_QHK = scores_QHK.softmax(-1).nan_to_num_(0.0) if none_QK.all(1).any() else scores_QHK.softmax(-1)
            out_THL[tile] = weights_QHK.to(kept_QKW.dtype) @ kept_QKW[..., :rank]
    return out_THL


def _tiles(row: Row, queries: int) -> list[slice]:
    return [slice(at, min(row.last, at + queries)) for at in range(row.first, row.last, queries)]
