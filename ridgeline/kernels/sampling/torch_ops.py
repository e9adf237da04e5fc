"""Sampling for all rows at once in plain torch, by a full sort where a filter asks for it. Legend as in op.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.core.plan import Feature
from ridgeline.kernels.sampling.op import SamplingTables
from ridgeline.kernels.sampling.philox import gumbel


def sample(
    logits_NV: Tensor,
    tables: SamplingTables,
    slots_N: Tensor,
    position_N: Tensor,
    features: Feature,
) -> Tensor:
    """As `op.sample_reference`; does only what `features` names."""
    if features & Feature.BIAS:
        ids_NB = tables.bias_ids_SB[slots_N].clamp(min=0)  # unused entries add 0 to token 0
        logits_NV = logits_NV.float().scatter_add(1, ids_NB, tables.bias_SB[slots_N])
    if features & Feature.MIN_TOKENS:
        logits_NV = _forbid_stops(logits_NV, tables, slots_N, position_N)
    if features & Feature.PENALTY:
        logits_NV = _penalize(logits_NV, tables, slots_N)
    best_N, greedy_N = logits_NV.max(-1)
    greedy_N = torch.where(best_N.isnan(), -1, greedy_N)
    if not features & Feature.RANDOM:
        return greedy_N
    temperature_N = tables.temperature_S[slots_N]
    is_greedy_N = (temperature_N == 0) | (greedy_N < 0)
    logits_NV = logits_NV.float()  # as a neighbour's bias or guidance would have made them
    logits_NV = logits_NV - logits_NV.amax(-1, keepdim=True)  # so that noise counts however cold a row is
    logits_NV = logits_NV / torch.where(is_greedy_N, 1, temperature_N)[:, None]
    if features & Feature.FILTER:
        logits_NV = _filter(logits_NV, tables, slots_N)
    if features & Feature.TYPICAL:
        logits_NV = _typical(logits_NV, tables.typical_p_S[slots_N][:, None])
    noise_NV = gumbel(tables.seed_S[slots_N], position_N, logits_NV.shape[1])
    return torch.where(is_greedy_N, greedy_N, (logits_NV + noise_NV).argmax(-1))


def _forbid_stops(logits_NV: Tensor, tables: SamplingTables, slots_N: Tensor, position_N: Tensor) -> Tensor:
    ids_NE = tables.stop_ids_SE[slots_N]
    early_N1 = (position_N < tables.min_len_S[slots_N])[:, None]
    forbidden_NE = torch.zeros_like(ids_NE, dtype=logits_NV.dtype).masked_fill((ids_NE >= 0) & early_N1, -torch.inf)
    return logits_NV.scatter_add(1, ids_NE.clamp(min=0), forbidden_NE)


def _penalize(logits_NV: Tensor, tables: SamplingTables, slots_N: Tensor) -> Tensor:
    count_NV = tables.output_count_SV[slots_N]
    emitted_NV = count_NV > 0
    seen_NV = emitted_NV | tables.prompt_seen_SV[slots_N]
    factor_NV = torch.where(seen_NV, tables.repetition_S[slots_N][:, None], 1)
    logits_NV = torch.where(logits_NV > 0, logits_NV / factor_NV, logits_NV * factor_NV)
    return (
        logits_NV - tables.frequency_S[slots_N][:, None] * count_NV - tables.presence_S[slots_N][:, None] * emitted_NV
    )


def _filter(logits_NV: Tensor, tables: SamplingTables, slots_N: Tensor) -> Tensor:
    """Logits with everything outside top-k, top-p and min-p at -inf. Ties go to the smaller token id."""
    ordered_NV, order_NV = logits_NV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    top_k_N1 = tables.top_k_S[slots_N][:, None]
    ordered_NV = ordered_NV.masked_fill((top_k_N1 > 0) & (rank_V >= top_k_N1), -torch.inf)
    probability_NV = ordered_NV.softmax(-1)
    before_NV = probability_NV.cumsum(-1) - probability_NV
    top_p_N1 = tables.top_p_S[slots_N][:, None]
    stays_NV = (before_NV < top_p_N1) | (top_p_N1 >= 1)  # rounding must not cut the tail of an unfiltered row
    stays_NV &= probability_NV >= tables.min_p_S[slots_N][:, None] * probability_NV[:, :1]
    stays_NV[:, 0] = True
    return torch.full_like(logits_NV, -torch.inf).scatter(1, order_NV, ordered_NV.masked_fill(~stays_NV, -torch.inf))


def _typical(logits_NV: Tensor, typical_p_N1: Tensor) -> Tensor:
    """Logits of the tokens nearest to the mean logit (see typical.py), the others at -inf."""
    probability_NV = logits_NV.softmax(-1)
    mean_N1 = torch.where(probability_NV > 0, probability_NV * logits_NV, 0).sum(-1, keepdim=True)
    distance_NV = (logits_NV - mean_N1).abs()
    nearest_NV, order_NV = distance_NV.sort(dim=-1, stable=True)
    enough_N1 = (probability_NV.gather(1, order_NV).cumsum(-1) < typical_p_N1).sum(-1, keepdim=True)
    reach_N1 = nearest_NV.gather(1, enough_N1.clamp(max=logits_NV.shape[1] - 1))
    return logits_NV.masked_fill((distance_NV > reach_N1) & (typical_p_N1 < 1), -torch.inf)
