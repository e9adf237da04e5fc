"""The vocabulary where ranks divide it: how they draw and report tokens from scores that none of them holds whole.

A rank scores its part of the vocabulary, and tells the others what they need of it:

    greedy and drawn rows   its winner, adjusted by biases, penalties and masks: 8 bytes
    rows with filters       on a GPU its scores; else how many tokens and how much mass it has by their distance from
                            the likeliest, a few KiB
    logprobs                its mass, the chosen token's score and rank, its likeliest tokens
    guidance                the masses of the two rows

Filters are cuts, which kernels/sampling/filter_cuts.py finds. A GPU gathers such rows whole, which was measured to be
faster (docs/parallel.md). Nothing is asked of the host, and no shape depends on what rows ask for, so all of it can be
captured.

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
from ridgeline.kernels.sampling.filter_cuts import cut_begin, cut_end, cut_round, mean, moments
from ridgeline.kernels.sampling.filter_search import Cut
from ridgeline.kernels.sampling.op import SamplingTables
from ridgeline.kernels.sampling.scoring import DeviceLogprobs, guide
from ridgeline.parallel.axis import Axis

GATHERED = 64 << 20  # bytes of a rank's scores that are gathered at once, so that whole rows take bounded memory


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
            if scores_RU.is_cuda:
                return self._gathered(scores_RU, tables, slots_R, position_R, features)
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

    def _gathered(
        self, scores_RU: Tensor, tables: SamplingTables, slots_R: Tensor, position_R: Tensor, features: Feature
    ) -> Tensor:
        """Draw from whole rows, of which so many are gathered at once that a rank hands out GATHERED bytes at most."""
        rows = max(1, GATHERED * len(scores_RU) // max(scores_RU.nbytes, 1))
        parts = zip(*(each.split(rows) for each in (scores_RU, slots_R, position_R)), strict=True)
        drawn = [self._ops.sample(self.whole(own), tables, slots, at, features) for own, slots, at in parts]
        return torch.cat(drawn) if len(drawn) > 1 else drawn[0]

    def _filtered(
        self, scores_RU: Tensor, tables: SamplingTables, slots_R: Tensor, position_R: Tensor, features: Feature
    ) -> Tensor:
        """Return this rank's adjusted scores, with -inf for tokens that the rows' filters remove."""
        asked = tables, slots_R, position_R, features
        source_RU, range_RJ = cut_begin(scores_RU, *asked, self.first, self.count)
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
            cut.told.append(self._axis.all_gather(cut_round(source_RU, cut, number)))
        return cut_end(source_RU, cut)

    def score(self, scores_RU: Tensor, token_R: Tensor, num_top: int) -> DeviceLogprobs:
        """Return the log-probabilities that the op `score_tokens` computes from the whole rows."""
        if not self.divided:
            return self._ops.score_tokens(scores_RU, token_R, num_top)
        num_top = min(num_top, self.size)
        own_R = token_R - self.first
        held_R = (own_R >= 0) & (own_R < self.count)
        own = self._score_own(scores_RU, own_R, num_top)
        chosen_R1 = self._values(scores_RU, own_R[:, None], held_R[:, None])
        told_RX = torch.cat((own.total_R[:, None], chosen_R1, *self._likeliest(scores_RU, own, num_top)), 1)
        told_RNX = self._axis.all_gather(told_RX).unflatten(1, (self._axis.size, -1))
        total_R1 = _log_total(told_RNX)
        chosen_R1 = told_RNX[..., 1].amax(1, keepdim=True)
        top_RN, id_RN = told_RNX[..., 2 : 2 + num_top], told_RNX[..., 2 + num_top :].contiguous().view(torch.int32)
        top_RL, top_ids_RL = likeliest(top_RN.flatten(1), id_RN.flatten(1).long(), num_top)
        above_R1 = (scores_RU[:, : self.count].float() > chosen_R1).sum(-1, keepdim=True, dtype=torch.int32)
        rank_R = self._axis.all_gather(above_R1).sum(-1) + 1
        logprob_R = (chosen_R1 - total_R1)[:, 0]
        return DeviceLogprobs(logprob_R, rank_R, top_ids_RL, top_RL - total_R1, total_R1[:, 0])

    def logprobs_of(self, scores_RU: Tensor, ids_RL: Tensor) -> Tensor:
        """Return the log-probabilities of each row's own tokens, which may lie with any rank: float32 [R, L]."""
        own_RL = ids_RL - self.first
        value_RL = self._values(scores_RU, own_RL, (own_RL >= 0) & (own_RL < self.count))
        told_RX = torch.cat((self._total(scores_RU), value_RL), 1)
        told_RNX = self._axis.all_gather(told_RX).unflatten(1, (self._axis.size, -1))
        return told_RNX[..., 1:].amax(1) - _log_total(told_RNX)

    def _score_own(self, scores_RU: Tensor, own_R: Tensor, num_top: int) -> DeviceLogprobs:
        """Score this rank's part alone by the op `score_tokens`, whose deterministic form adds up a row in one way."""
        x_RU = scores_RU[:, : self.count]
        if self.count:
            return self._ops.score_tokens(x_RU, own_R.clamp(0, self.count - 1), num_top)
        nothing_RL = x_RU.new_empty(len(x_RU), 0, dtype=torch.float32)
        total_R = torch.full_like(own_R, -torch.inf, dtype=torch.float32)
        return DeviceLogprobs(total_R, torch.ones_like(own_R), nothing_RL.long(), nothing_RL, total_R)

    def _total(self, scores_RU: Tensor) -> Tensor:
        """Return the logarithms of the rows' masses in this rank's part: [R, 1]."""
        nothing_R = torch.zeros(len(scores_RU), dtype=torch.int64, device=scores_RU.device)
        return self._score_own(scores_RU, nothing_R, 0).total_R[:, None]

    def _values(self, scores_RU: Tensor, own_RL: Tensor, held_RL: Tensor) -> Tensor:
        """Return the scores of columns of this rank's part, -inf for tokens that it does not hold: float32 [R, L]."""
        if not self.count:
            return torch.full_like(own_RL, -torch.inf, dtype=torch.float32)
        return scores_RU.gather(1, own_RL.clamp(0, self.count - 1)).float().where(held_RL, -torch.inf)

    def _likeliest(self, scores_RU: Tensor, own: DeviceLogprobs, num_top: int) -> tuple[Tensor, Tensor]:
        """Return the scores of the part's likeliest tokens, filled up with none, and the bits of their ids."""
        value_RL = own.total_R.new_full((len(scores_RU), num_top), -torch.inf)
        id_RL = torch.full_like(value_RL, -1, dtype=torch.int32)
        if found := own.top_ids_RL.shape[1]:
            value_RL[:, :found] = scores_RU.gather(1, own.top_ids_RL).float()
            id_RL[:, :found] = own.top_ids_RL + self.first
        return value_RL, id_RL.view(torch.float32)

    def guide(self, scores_RU: Tensor, row_F: Tensor, negative_F: Tensor, scale_F: Tensor) -> Tensor:
        """Return this rank's part of what `scoring.guide` does with the whole rows."""
        if not self.divided:
            return guide(scores_RU, row_F, negative_F, scale_F)
        both_FU = scores_RU[torch.cat((row_F, negative_F))].float()
        total_FN = self._axis.all_gather(self._total(both_FU))
        logprobs_FU = both_FU - _log_total(total_FN[..., None])
        c_FU, u_FU = logprobs_FU.chunk(2)
        return scores_RU.float().index_copy(0, row_F, torch.lerp(u_FU, c_FU, scale_F[:, None]))


def likeliest(value_RX: Tensor, token_RX: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest values of each row, and the tokens beside them. Equal ones keep their order."""
    value_RX, order_RX = value_RX.sort(dim=-1, descending=True, stable=True)
    return value_RX[:, :count], token_RX.gather(1, order_RX[:, :count])


def _log_total(told_RNX: Tensor) -> Tensor:
    """Return the logarithms of the rows' masses over all ranks, added up in the order of ranks: [R, 1]."""
    total_RN = told_RNX[..., 0]
    total_R = total_RN[:, 0]
    for rank in range(1, total_RN.shape[1]):
        total_R = torch.logaddexp(total_R, total_RN[:, rank])
    return total_R[:, None]
