"""Filters on the likeliest tokens of each rank, where ranks divide the vocabulary.

The C likeliest tokens of all are among the C likeliest of each rank. If the filters' cut lies among them, so does the
token that is drawn, and the rest of the vocabulary counts by its mass alone.

Legend:
    R  rows
    U  tokens of this rank's part of the vocabulary
    C  candidates of a row
    N  ranks
    X  numbers that a rank tells of a row: its candidates' logits and ids, its largest logit, its mass
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.kernels.sampling.op import SamplingTables
from ridgeline.kernels.sampling.philox import gumbel_of
from ridgeline.kernels.sampling.torch_ops import typical

CANDIDATES = 128  # of a rank: 1 KiB a row, where half of a row of 128,256 tokens takes 128 KiB


def told(logits_RU: Tensor, temperature_R: Tensor, first: int, count: int) -> Tensor:
    """Return what a rank tells of its adjusted logits (float32): [R, X]. Equal logits are in the order of their ids."""
    ordered_RU, order_RU = logits_RU.sort(dim=-1, descending=True, stable=True)
    missing = max(0, count - logits_RU.shape[1])
    value_RC = functional.pad(ordered_RU[:, :count], (0, missing), value=-torch.inf)
    token_RC = functional.pad(order_RU[:, :count] + first, (0, missing), value=-1).int()
    largest_R1 = value_RC[:, :1]
    mass_R1 = ((logits_RU - largest_R1) / heat(temperature_R)[:, None]).exp().nansum(-1, keepdim=True)
    return torch.cat((value_RC, token_RC.view(torch.float32), largest_R1, mass_R1), 1)


def draw_filtered(
    told_RNX: Tensor, tables: SamplingTables, slots_R: Tensor, position_R: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Return (token_R, decided_R): a token drawn from those that top-k, top-p, min-p and typical-p leave, and where the
    candidates were enough to know it. Greedy rows have no meaning here."""
    count = (told_RNX.shape[2] - 2) // 2
    temperature_R1 = heat(tables.temperature_S[slots_R])[:, None]
    value_RC, token_RC = _merged(told_RNX, count)
    largest_RN, mass_RN = told_RNX[..., -2], told_RNX[..., -1]
    top_R1 = value_RC[:, :1]
    total_R1 = (((largest_RN - top_R1) / temperature_R1).exp() * mass_RN).nansum(-1, keepdim=True)
    warm_RC = (value_RC - top_R1) / temperature_R1
    top_k_R1 = tables.top_k_S[slots_R][:, None]
    by_rank_R1 = (top_k_R1 > 0) & (top_k_R1 <= count)
    rank_C = torch.arange(count, device=warm_RC.device)
    warm_RC = warm_RC.masked_fill(by_rank_R1 & (rank_C >= top_k_R1), -torch.inf)
    # A sum of at most C terms, as where all of the row is here
    probability_RC = torch.where(by_rank_R1, warm_RC.softmax(-1), warm_RC.exp() / total_R1)
    before_RC = probability_RC.cumsum(-1) - probability_RC
    top_p_R1 = tables.top_p_S[slots_R][:, None]
    stays_RC = (before_RC < top_p_R1) | (top_p_R1 >= 1)
    stays_RC &= probability_RC >= tables.min_p_S[slots_R][:, None] * probability_RC[:, :1]
    stays_RC[:, 0] = True
    decided_R = by_rank_R1[:, 0] | ((top_k_R1[:, 0] <= 0) & ~stays_RC[:, -1])
    decided_R |= vocab_size <= count
    kept_RC = typical(warm_RC.masked_fill(~stays_RC, -torch.inf), tables.typical_p_S[slots_R][:, None])
    noise_RC = gumbel_of(tables.seed_S[slots_R], position_R, token_RC)
    place_R1 = (kept_RC + noise_RC).argmax(-1, keepdim=True)
    return token_RC.gather(1, place_R1)[:, 0], decided_R


def is_filtered(tables: SamplingTables, slots_R: Tensor) -> Tensor:
    """Return which rows ask for a filter: bool [R]."""
    filters_R = (tables.top_k_S[slots_R] > 0) | (tables.top_p_S[slots_R] < 1) | (tables.min_p_S[slots_R] > 0)
    return (filters_R | (tables.typical_p_S[slots_R] < 1)) & (tables.temperature_S[slots_R] > 0)


def likeliest(value_RX: Tensor, token_RX: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest values of each row, and the tokens beside them. Equal ones keep their order."""
    value_RX, order_RX = value_RX.sort(dim=-1, descending=True, stable=True)
    return value_RX[:, :count], token_RX.gather(1, order_RX[:, :count])


def _merged(told_RNX: Tensor, count: int) -> tuple[Tensor, Tensor]:
    value = told_RNX[..., :count].flatten(1)
    token = told_RNX[..., count : 2 * count].contiguous().view(torch.int32).flatten(1)
    return likeliest(value, token.long(), count)


def heat(temperature_R: Tensor) -> Tensor:
    """Return the temperatures, with 1 for greedy rows."""
    return torch.where(temperature_R > 0, temperature_R, 1)
