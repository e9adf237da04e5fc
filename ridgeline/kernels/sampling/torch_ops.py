"""Sampling for all rows at once in plain torch, by a full sort if a filter asks for it.

The legend is that of op.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.base.rows import Feature
from ridgeline.kernels.sampling.op import SamplingTables
from ridgeline.kernels.sampling.philox import gumbel

ADJUSTING = Feature.BIAS | Feature.MIN_TOKENS | Feature.PENALTY


def sample(
    logits_RV: Tensor,
    tables: SamplingTables,
    slots_R: Tensor,
    position_R: Tensor,
    features: Feature,
) -> Tensor:
    """Compute `op.sample_reference`, but only the steps that `features` names."""
    if features & ADJUSTING:
        logits_RV = adjusted(logits_RV, tables, slots_R, position_R, features)
    best_R, greedy_R = logits_RV.max(-1)
    greedy_R = torch.where(best_R.isnan(), -1, greedy_R)
    if not features & Feature.RANDOM:
        return greedy_R
    temperature_R = tables.temperature_S[slots_R]
    is_greedy_R = (temperature_R == 0) | (greedy_R < 0)
    logits_RV = logits_RV.float()  # always, since a neighbour's bias or guidance would make them float32 too
    logits_RV = logits_RV - logits_RV.amax(-1, keepdim=True)  # so that noise counts however cold a row is
    logits_RV = logits_RV / torch.where(is_greedy_R, 1, temperature_R)[:, None]
    if features & Feature.FILTER:
        logits_RV = _filter(logits_RV, tables, slots_R)
    if features & Feature.TYPICAL:
        logits_RV = typical(logits_RV, tables.typical_p_S[slots_R][:, None])
    noise_RV = gumbel(tables.seed_S[slots_R], position_R, logits_RV.shape[1])
    return torch.where(is_greedy_R, greedy_R, (logits_RV + noise_RV).argmax(-1))


def adjusted(
    logits_RV: Tensor, tables: SamplingTables, slots_R: Tensor, position_R: Tensor, features: Feature
) -> Tensor:
    """Return the logits with biases, without stops that come too early, and with penalties."""
    if features & Feature.BIAS:
        ids_RB = tables.bias_ids_SB[slots_R].clamp(min=0)  # unused entries add 0 to token 0
        logits_RV = logits_RV.float().scatter_add(1, ids_RB, tables.bias_SB[slots_R])
    if features & Feature.MIN_TOKENS:
        logits_RV = _forbid_stops(logits_RV, tables, slots_R, position_R)
    if features & Feature.PENALTY:
        logits_RV = _penalize(logits_RV, tables, slots_R)
    return logits_RV


def _forbid_stops(logits_RV: Tensor, tables: SamplingTables, slots_R: Tensor, position_R: Tensor) -> Tensor:
    ids_RE = tables.stop_ids_SE[slots_R]
    early_R1 = (position_R < tables.min_len_S[slots_R])[:, None]
    forbidden_RE = torch.zeros_like(ids_RE, dtype=logits_RV.dtype).masked_fill((ids_RE >= 0) & early_R1, -torch.inf)
    return logits_RV.scatter_add(1, ids_RE.clamp(min=0), forbidden_RE)


def _penalize(logits_RV: Tensor, tables: SamplingTables, slots_R: Tensor) -> Tensor:
    count_RV = tables.output_count_SV[slots_R]
    emitted_RV = count_RV > 0
    seen_RV = emitted_RV | tables.prompt_seen_SV[slots_R]
    factor_RV = torch.where(seen_RV, tables.repetition_S[slots_R][:, None], 1)
    logits_RV = torch.where(logits_RV > 0, logits_RV / factor_RV, logits_RV * factor_RV)
    return (
        logits_RV - tables.frequency_S[slots_R][:, None] * count_RV - tables.presence_S[slots_R][:, None] * emitted_RV
    )


def _filter(logits_RV: Tensor, tables: SamplingTables, slots_R: Tensor) -> Tensor:
    """Return the logits with -inf for tokens that top-k, top-p or min-p remove. Ties go to the smaller token id."""
    ordered_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    top_k_R1 = tables.top_k_S[slots_R][:, None]
    ordered_RV = ordered_RV.masked_fill((top_k_R1 > 0) & (rank_V >= top_k_R1), -torch.inf)
    probability_RV = ordered_RV.softmax(-1)
    before_RV = probability_RV.cumsum(-1) - probability_RV
    top_p_R1 = tables.top_p_S[slots_R][:, None]
    stays_RV = (before_RV < top_p_R1) | (top_p_R1 >= 1)  # rounding must not cut the tail of an unfiltered row
    stays_RV &= probability_RV >= tables.min_p_S[slots_R][:, None] * probability_RV[:, :1]
    stays_RV[:, 0] = True
    return torch.full_like(logits_RV, -torch.inf).scatter(1, order_RV, ordered_RV.masked_fill(~stays_RV, -torch.inf))


def typical(logits_RV: Tensor, typical_p_R1: Tensor) -> Tensor:
    """Return the logits of the tokens nearest to the mean logit (see typical.py), with -inf for the others."""
    probability_RV = logits_RV.softmax(-1)
    mean_R1 = torch.where(probability_RV > 0, probability_RV * logits_RV, 0).sum(-1, keepdim=True)
    distance_RV = (logits_RV - mean_R1).abs()
    nearest_RV, order_RV = distance_RV.sort(dim=-1, stable=True)
    enough_R1 = (probability_RV.gather(1, order_RV).cumsum(-1) < typical_p_R1).sum(-1, keepdim=True)
    reach_R1 = nearest_RV.gather(1, enough_R1.clamp(max=logits_RV.shape[1] - 1))
    return logits_RV.masked_fill((distance_RV > reach_R1) & (typical_p_R1 < 1), -torch.inf)
