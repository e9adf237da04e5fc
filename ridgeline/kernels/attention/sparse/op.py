"""Attention of each token to the cached tokens that an indexer scores highest (DeepSeek-V3.2, arXiv 2512.02556, section
2.1): the indexer's keys are kept, tokens are chosen by them, and latent attention runs over the chosen ones alone.

A place is the number of a token in its row's cache. Without a tree of drafts it is the token's position.

Legend:
    T  tokens of the step
    R  rows
    N  cache blocks
    P  tokens per block
    I  heads of the indexer
    D  width of the indexer's keys
    Y  width of their rotated part, which comes first
    K  tokens that are chosen
    H  query heads of attention
    L  width of a latent
    W  the numbers that are kept of a token
    Z  rows of the table of angles
    Q  queries of one row
    J  cached tokens of one row
    W  words of 64 bits, of bits
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.attention.latent.op import rotated
from ridgeline.kernels.attention.paged.op import RaggedBatch
from ridgeline.kernels.base.kv_cache import levels, numbers, row_scales, taken
from ridgeline.kernels.base.op import Implementation, Op, on_cpu, on_gpu
from ridgeline.kernels.base.tree import Tree, sight


class IndexCache(NamedTuple):
    """The cached keys of a layer's indexer, whose blocks may have a stride of their own.

    keys_NPD: numbers in the dtype of activations, or levels of 8 bits.
    scale_NP: what the levels of a token are multiplied by, bfloat16; None: keys are numbers.
    """

    keys_NPD: Tensor
    scale_NP: Tensor | None = None

    def of(self, blocks_B: Tensor) -> Tensor:
        """Return the keys of some blocks, one token after the other, levels as float32 numbers: [B P, D]."""
        kept_BPD = taken(self.keys_NPD, blocks_B)
        if self.scale_NP is not None:
            kept_BPD = numbers(kept_BPD, self.scale_NP[blocks_B], torch.float32)
        return kept_BPD.flatten(0, 1)


def index_keys_reference(
    q_TID: Tensor,
    key_TD: Tensor,
    norm_2D: tuple[Tensor, Tensor],
    eps: float,
    cos_sin_ZY: Tensor,
    positions_T: Tensor,
    interleaved: bool,
    cache: IndexCache,
    place_T: Tensor,
) -> Tensor:
    """Store every token's key, normalised and then rotated, and return the queries, rotated: dense [T, I, D].

    key_TD: keys as they were projected; they may be a view of wider rows.
    norm_2D: weight and bias of the keys' LayerNorm.
    cos_sin_ZY: float32 [Z, Y], cosines then sines.
    interleaved: numbers 2 i and 2 i + 1 rotate as a pair, and otherwise i and Y / 2 + i. Results have the latter order
        in both cases.
    cache: takes the keys, as levels with a scale for each token where it has scales.
    place_T: block * P + offset, for every token.
    """
    kept_TD, q_TID = prepared(q_TID, key_TD, norm_2D, eps, cos_sin_ZY, positions_T, interleaved)
    cache_NPD, scale_NP = cache
    block_T, offset_T = place_T.long() // cache_NPD.shape[1], place_T.long() % cache_NPD.shape[1]
    if scale_NP is None:
        cache_NPD[block_T, offset_T] = kept_TD.to(cache_NPD.dtype)
        return q_TID
    scale_T = row_scales(kept_TD, cache_NPD.dtype)
    scale_NP[block_T, offset_T] = scale_T
    cache_NPD.view(torch.uint8)[block_T, offset_T] = levels(kept_TD, scale_T, cache_NPD.dtype).view(torch.uint8)
    return q_TID


def prepared(
    q_TID: Tensor,
    key_TD: Tensor,
    norm_2D: tuple[Tensor, Tensor],
    eps: float,
    cos_sin_ZY: Tensor,
    positions_T: Tensor,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Return (the keys that are kept, [T, D]; the queries, [T, I, D]), rotated."""
    width, (weight_D, bias_D) = cos_sin_ZY.shape[1], norm_2D
    normed_TD = F.layer_norm(key_TD.float(), weight_D.shape, weight_D.float(), bias_D.float(), eps).to(key_TD.dtype)
    angles_T1Y = cos_sin_ZY[positions_T.long()][:, None]
    turned = [
        torch.cat((rotated(x[..., :width], angles_T1Y, interleaved), x[..., width:]), dim=-1)
        for x in (normed_TD[:, None], q_TID)
    ]
    return turned[0][:, 0], turned[1]


def index_scores(q_QID: Tensor, weights_QI: Tensor, key_JD: Tensor) -> Tensor:
    """Return the scores of cached tokens, the sum over heads of weight · relu(q · key): float32 [Q, J]."""
    dots_QIJ = F.relu(q_QID.float() @ key_JD.float().T)
    return (weights_QI.float()[:, None] @ dots_QIJ)[:, 0] + 0.0  # -0 and 0 are one score


def best(scores_QJ: Tensor, seen_QJ: Tensor, count: int) -> Tensor:
    """Return True for the `count` tokens that a query sees with the highest scores, for all that it sees if these are
    fewer: bool [Q, J]. Of equal scores the earlier token is taken."""
    if scores_QJ.shape[1] <= count:
        return seen_QJ
    scores_QJ = scores_QJ.masked_fill(~seen_QJ, -torch.inf)
    least_Q1 = scores_QJ.topk(count, dim=1).values[:, -1:]
    above_QJ, equal_QJ = scores_QJ > least_Q1, (scores_QJ == least_Q1) & seen_QJ
    missing_Q1 = count - above_QJ.sum(1, keepdim=True)
    return above_QJ | (equal_QJ & (equal_QJ.cumsum(1) <= missing_Q1))


def index_topk_reference(
    q_TID: Tensor, weights_TI: Tensor, cache: IndexCache, batch: RaggedBatch, *, count: int
) -> Tensor:
    """Return the places of the `count` tokens that each token's scores (`index_scores`) are highest for, in rising
    order: int32 [T, count]. A token sees those up to its own position, or those of its tree; where these are fewer, all
    are taken, and -1 stands behind them. Of equal scores the earlier place is taken.

    weights_TI: what the scores of heads are multiplied by.
    cache: the keys that were kept. Cells that no query sees never influence the result.
    """
    chosen_TK = torch.full((len(q_TID), count), -1, dtype=torch.int32, device=q_TID.device)
    starts, lengths, block_size = batch.start_R1.tolist(), batch.kv_len_R.tolist(), cache.keys_NPD.shape[1]
    for row, slot in enumerate(batch.slots_R.tolist()):
        length, last = lengths[row], starts[row + 1]
        key_JD = cache.of(batch.block_table_SC[slot, : -(-length // block_size)].long())[:length]
        for token in range(starts[row], last):
            seen_J = sees(slice(token, token + 1), length - (last - token), length, batch.tree, q_TID.device)[0]
            place_j = seen_J.nonzero()[:, 0]
            own = slice(token, token + 1)
            scores_j = index_scores(q_TID[own], weights_TI[own], key_JD[place_j])[0]
            found = place_j[scores_j.sort(descending=True, stable=True).indices[:count]].sort().values
            chosen_TK[token, : len(found)] = found
    return chosen_TK


def choice_bits_reference(chosen_TK: Tensor, words: int) -> Tensor:
    """Return the chosen places as bits, 64 places a word: int64 [T, words]. Places are distinct, and lie within the
    words."""
    real_TK = chosen_TK >= 0
    place_TK = chosen_TK.clamp(min=0).long()
    bits_TW = torch.zeros(len(chosen_TK), words, dtype=torch.int64, device=chosen_TK.device)
    return bits_TW.scatter_add_(1, place_TK // 64, real_TK.long() << (place_TK % 64))


def sees(tokens: slice, position: int, length: int, tree: Tree | None, device: torch.device) -> Tensor:
    """Return True where neighbouring tokens of a row see its cached tokens: bool [Q, length]. position: of the first
    token, without a tree."""
    key_1J = torch.arange(length, device=device)[None]
    if tree is None:
        return key_1J <= torch.arange(position, position + tokens.stop - tokens.start, device=device)[:, None]
    return sight(tree.bits_T[tokens, None], tree.base_T[tokens, None], key_1J)[0]


def sparse_attention_reference(
    q_THL: Tensor, q_THY: Tensor, cache_NPW: Tensor, batch: RaggedBatch, chosen_TK: Tensor, *, scale: float
) -> Tensor:
    """Return softmax(scale · (q c + q' r)) c over the chosen tokens, computed in float32: dense [T, H, L] in q's dtype;
    0 where none is chosen.

    q_THL: queries against the latents. q_THY: their rotated parts.
    cache_NPW: the latents c and the rotated parts r of keys.
    chosen_TK: places, as `index_topk` returns them. Other cells never influence the result.
    """
    out_THL = torch.zeros_like(q_THL, memory_format=torch.contiguous_format)
    starts, (rank, block_size) = batch.start_R1.tolist(), (q_THL.shape[2], cache_NPW.shape[1])
    for row, slot in enumerate(batch.slots_R.tolist()):
        for token in range(starts[row], starts[row + 1]):
            place_j = chosen_TK[token][chosen_TK[token] >= 0].long()
            if not len(place_j):
                continue
            block_j = batch.block_table_SC[slot, place_j // block_size].long()
            kept_jW = cache_NPW[block_j, place_j % block_size].float()
            q_HW = torch.cat((q_THL[token], q_THY[token]), dim=-1).float()
            weights_Hj = (scale * q_HW @ kept_jW.T).softmax(-1)
            out_THL[token] = (weights_Hj @ kept_jW[:, :rank]).to(out_THL.dtype)
    return out_THL


_HERE = "ridgeline.kernels.attention.sparse"

INDEX_KEYS = Op("index_keys", index_keys_reference, (Implementation("triton", f"{_HERE}.triton:index_keys", on_gpu),))
INDEX_TOPK = Op(
    "index_topk",
    index_topk_reference,
    (
        Implementation("triton", f"{_HERE}.triton:index_topk", on_gpu),
        Implementation("torch", f"{_HERE}.torch_ops:index_topk", on_cpu),
    ),
    matrix=True,
)
CHOICE_BITS = Op(
    "choice_bits", choice_bits_reference, (Implementation("triton", f"{_HERE}.triton:choice_bits", on_gpu),)
)
SPARSE_ATTENTION = Op(
    "sparse_attention",
    sparse_attention_reference,
    (
        Implementation("triton", f"{_HERE}.triton:sparse_attention", on_gpu),
        Implementation("torch", f"{_HERE}.torch_ops:sparse_attention", on_cpu),
    ),
    matrix=True,
)
