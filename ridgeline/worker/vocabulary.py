"""The vocabulary where ranks divide it: how they draw and report tokens from scores that none of them holds whole.

A rank scores its part of the vocabulary, and tells the others what they need of it:

    greedy and drawn rows   its winner, adjusted by biases, penalties and masks: 8 bytes
    rows with filters       how many tokens and how much mass it has by their distance from the likeliest: a few KiB
    logprobs                its mass, the chosen token's score and rank, its likeliest tokens
    guidance                the masses of the two rows

Filters are cuts, which kernels/sampling/cuts.py finds. Nothing is asked of the host, and no shape depends on the rows,
so all of it can be captured. On a GPU such rows are gathered whole, which was measured to be faster.

Legend:
    R  rows, or positions of a prompt
    U  tokens of this rank's part of the vocabulary, padding included
    V  vocabulary
    L  tokens reported beside the chosen one
    F  guided rows
    N  ranks
    X  numbers that a rank tells of a row
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.plan.step import Feature
from ridgeline.core.plan.token_bits import part_of
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.sampling.cut_search import Cut
from ridgeline.kernels.sampling.cuts import mean, moments
from ridgeline.kernels.sampling.op import SamplingTables
from ridgeline.kernels.sampling.scoring import DeviceLogprobs, guide
from ridgeline.parallel.axis import Axis

GATHERED = 64 << 20  # bytes of a rank's scores, up to which a GPU gathers them faster than it searches


class Vocabulary:
    """The tokens `first` … first + count - 1, which this rank scores, among `size` tokens.

    divided: there are other ranks with other parts. Scores have `each` columns on every rank; where the last part is
    short, the rest means nothing.
    """

    def __init__(self, size: int, axis: Axis, ops: Ops) -> None:
        self.size, self._axis, self._ops = size, axis, ops
        self.each = -(-size // axis.size)
        self.first = min(self.each * axis.rank, size)
        self.count = min(self.each, size - self.first)
        self.divided = axis.size > 1

    def whole(self, scores_RU: Tensor) -> Tensor:
        """Return the scores of all tokens: [R, V]."""
        return self._axis.all_gather(scores_RU)[:, : self.size] if self.divided else scores_RU

    def own_bits(self, masks: Mapping[int, np.ndarray]) -> Mapping[int, np.ndarray]:
        """Return the part of each row's token mask that is for the tokens of this rank."""
        if not self.divided:
            return masks
        return {row: part_of(bits_W, self.first, self.each) for row, bits_W in masks.items()}

    def sample(
        self, scores_RU: Tensor, tables: SamplingTables, slots_R: Tensor, position_R: Tensor, features: Feature
    ) -> Tensor:
        """Return the tokens that the op `sample` draws from the whole rows, the same on every rank: int64 [R]."""
        if not self.divided:
            return self._ops.sample(scores_RU, tables, slots_R, position_R, features)
        if features & Feature.FILTER:
            if scores_RU.is_cuda and scores_RU.nbytes <= GATHERED:
                return self._ops.sample(self.whole(scores_RU), tables, slots_R, position_R, features)
            scores_RU = self._filtered(scores_RU, tables, slots_R, position_R, features)
            features &= Feature.RANDOM
        return self._winners(scores_RU, tables, slots_R, position_R, features)

    def _winners(
        self, scores_RU: Tensor, tables: SamplingTables, slots_R: Tensor, position_R: Tensor, features: Feature
    ) -> Tensor:
        if self.count:
            own_RU = scores_RU[:, : self.count]
            pair_R2 = self._ops.draw_part(own_RU, tables, slots_R, position_R, features, self.first)
        else:
            pair_R2 = torch.full((len(scores_RU), 2), -1, dtype=torch.int32, device=scores_RU.device)
        pairs_RN2 = self._axis.all_gather(pair_R2).view(len(pair_R2), self._axis.size, 2)
        return self._ops.best_of_parts(pairs_RN2, tables, slots_R, position_R, features)

    def _filtered(
        self, scores_RU: Tensor, tables: SamplingTables, slots_R: Tensor, position_R: Tensor, features: Feature
    ) -> Tensor:
        """Return this rank's adjusted scores, with -inf for tokens that the rows' filters remove."""
        asked = tables, slots_R, position_R, features
        source_RU, range_RJ = self._ops.cut_begin(scores_RU, *asked, self.first, self.count)
        range_RM2 = self._axis.all_gather(range_RJ).unflatten(1, (-1, 2))
        cut = Cut(tables, slots_R, range_RM2, self._axis.rank, self._axis.size, self.count, self.size)
        kept_RU = self._cut(source_RU, cut)
        if not features & Feature.TYPICAL:
            return kept_RU
        mean_R = mean(self._axis.all_gather(moments(kept_RU[:, : self.count], cut)))
        return self._cut(kept_RU, replace(cut, mean_R=mean_R))

    def _cut(self, source_RU: Tensor, cut: Cut) -> Tensor:
        """Return the scores with -inf for tokens behind the rows' cuts."""
        for number in range(cut.rounds):
            cut.told.append(self._axis.all_gather(self._ops.cut_round(source_RU, cut, number)))
        return self._ops.cut_end(source_RU, cut)

    def score(self, scores_RU: Tensor, token_R: Tensor, num_top: int) -> DeviceLogprobs:
        """Return the log-probabilities that the op `score_tokens` computes from the whole rows."""
        if not self.divided:
            return self._ops.score_tokens(scores_RU, token_R, num_top)
        x_RU, num_top = scores_RU[:, : self.count].float(), min(num_top, self.size)
        own_R, column_R = token_R - self.first, (token_R - self.first).clamp(0, max(self.count - 1, 0))
        held_R = (own_R >= 0) & (own_R < self.count)
        chosen_R1 = x_RU.new_full((len(x_RU), 1), -torch.inf)
        if self.count:
            chosen_R1 = x_RU.gather(1, column_R[:, None]).where(held_R[:, None], -torch.inf)
        told_RX = torch.cat((_mass(x_RU), chosen_R1, *self._likeliest(x_RU, num_top)), 1)
        told_RNX = self._axis.all_gather(told_RX).unflatten(1, (self._axis.size, -1))
        total_R1 = _log_total(told_RNX)
        chosen_R1 = told_RNX[..., 2].amax(1, keepdim=True)
        top_RN, id_RN = told_RNX[..., 3 : 3 + num_top], told_RNX[..., 3 + num_top :].contiguous().view(torch.int32)
        top_RL, top_ids_RL = likeliest(top_RN.flatten(1), id_RN.flatten(1).long(), num_top)
        above_R1 = (x_RU > chosen_R1).sum(-1, keepdim=True, dtype=torch.int32)
        rank_R = self._axis.all_gather(above_R1).sum(-1) + 1
        return DeviceLogprobs((chosen_R1 - total_R1)[:, 0], rank_R, top_ids_RL, top_RL - total_R1)

    def named(self, scores_RU: Tensor, ids_RL: Tensor) -> Tensor:
        """Return the log-probabilities of each row's own tokens, which may lie with any rank: float32 [R, L]."""
        x_RU = scores_RU[:, : self.count].float()
        held_RL = (ids_RL >= self.first) & (ids_RL < self.first + self.count)
        value_RL = x_RU.new_full(ids_RL.shape, -torch.inf)
        if self.count:
            value_RL = x_RU.gather(1, (ids_RL - self.first).clamp(0, self.count - 1)).where(held_RL, -torch.inf)
        told_RNX = self._axis.all_gather(torch.cat((_mass(x_RU), value_RL), 1)).unflatten(1, (self._axis.size, -1))
        return told_RNX[..., 2:].amax(1) - _log_total(told_RNX)

    def _likeliest(self, x_RU: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
        """Return the part's likeliest tokens, filled up with none: values, and the bits of ids."""
        top = x_RU.topk(min(num_top, self.count), dim=-1)
        value_RL = x_RU.new_full((len(x_RU), num_top), -torch.inf)
        id_RL = torch.full_like(value_RL, -1, dtype=torch.int32)
        value_RL[:, : top.values.shape[1]], id_RL[:, : top.values.shape[1]] = top.values, top.indices + self.first
        return value_RL, id_RL.view(torch.float32)

    def guide(self, scores_RU: Tensor, row_F: Tensor, negative_F: Tensor, scale_F: Tensor) -> Tensor:
        """Return this rank's part of what `scoring.guide` does with the whole rows."""
        if not self.divided:
            return guide(scores_RU, row_F, negative_F, scale_F)
        both_FU = scores_RU[torch.cat((row_F, negative_F))].float()
        told_FX = self._axis.all_gather(_mass(both_FU[:, : self.count]))
        logprobs_FU = both_FU - _log_total(told_FX.unflatten(1, (self._axis.size, -1)))
        c_FU, u_FU = logprobs_FU.chunk(2)
        return scores_RU.float().index_copy(0, row_F, torch.lerp(u_FU, c_FU, scale_F[:, None]))


def likeliest(value_RX: Tensor, token_RX: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest values of each row, and the tokens beside them. Equal ones keep their order."""
    value_RX, order_RX = value_RX.sort(dim=-1, descending=True, stable=True)
    return value_RX[:, :count], token_RX.gather(1, order_RX[:, :count])


def _mass(x_RU: Tensor) -> Tensor:
    """Return the largest number of each row, and the sum of e to the others' distances from it: [R, 2]."""
    if not x_RU.shape[1]:
        return torch.stack((x_RU.new_full((len(x_RU),), -torch.inf), x_RU.new_zeros(len(x_RU))), 1)
    top_R1 = x_RU.amax(-1, keepdim=True)
    # A part of which masks left nothing has no mass, and no distances
    return torch.cat((top_R1, (x_RU - top_R1.clamp(min=torch.finfo(x_RU.dtype).min)).exp().sum(-1, keepdim=True)), 1)


def _log_total(told_RNX: Tensor) -> Tensor:
    """Return the logarithms of the rows' masses over all ranks: [R, 1]."""
    top_RN, mass_RN = told_RNX[..., 0], told_RNX[..., 1]
    top_R1 = top_RN.amax(-1, keepdim=True)
    return top_R1 + ((top_RN - top_R1).exp() * mass_RN).sum(-1, keepdim=True).log()
