"""Sampling where ranks divide the vocabulary: what one rank draws from its part, and which of these draws is the row's.

A draw is a largest number: of the logits, or of the logits with noise that is a function of seed, position and token
id. So the largest of the parts' winners is the winner of all, and ranks need each other's winners alone.

Legend:
    S  slots
    R  rows
    U  tokens of this rank's part of the vocabulary
    N  ranks
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, on_gpu
from ridgeline.kernels.base.rows import Feature
from ridgeline.kernels.sampling.op import SamplingTables
from ridgeline.kernels.sampling.philox import gumbel, gumbel_of
from ridgeline.kernels.sampling.torch_ops import adjusted

UNUSED = Feature.FILTER | Feature.TYPICAL  # what `draw_part` does not look at


def tables_of(tables: SamplingTables, first: int, count: int) -> SamplingTables:
    """Return the tables for the tokens `first` … first + count - 1, which are numbered from 0."""

    def own(ids: Tensor) -> Tensor:
        return torch.where((ids >= first) & (ids < first + count), ids - first, -1)

    bias_ids_SB = own(tables.bias_ids_SB)
    return replace(
        tables,
        stop_ids_SE=own(tables.stop_ids_SE),
        bias_ids_SB=bias_ids_SB,
        bias_SB=tables.bias_SB.where(bias_ids_SB >= 0, 0),
        output_count_SV=tables.output_count_SV[:, first : first + count],
        prompt_seen_SV=tables.prompt_seen_SV[:, first : first + count],
    )


def draw_part(
    logits_RU: Tensor,
    tables: SamplingTables,
    slots_R: Tensor,
    position_R: Tensor,
    features: Feature,
    first: int,
) -> Tensor:
    """Draw one token per row from the tokens `first` … first + U - 1, without filters.

    Return int32 [R, 2]: the token, or -1 where the logits are NaN; and the bits of its logit, adjusted as
    `op.sample_reference` does, as a float32.
    """
    count = logits_RU.shape[1]
    logits_RU = adjusted(logits_RU, tables_of(tables, first, count), slots_R, position_R, features).float()
    best_R, token_R = logits_RU.max(-1)
    is_nan_R = best_R.isnan()
    if features & Feature.RANDOM:
        temperature_R = tables.temperature_S[slots_R]
        heat_R1 = torch.where(temperature_R > 0, temperature_R, 1)[:, None]
        noise_RU = gumbel(tables.seed_S[slots_R], position_R, count, first)
        drawn_R = ((logits_RU - best_R[:, None]) / heat_R1 + noise_RU).argmax(-1)
        token_R = torch.where((temperature_R > 0) & best_R.isfinite(), drawn_R, token_R)
    score_R = logits_RU.gather(1, token_R[:, None])[:, 0]
    token_R = torch.where(is_nan_R, -1, token_R + first)
    return torch.stack((token_R.int(), score_R.view(torch.int32)), 1)


def best_of_parts(
    pairs_RN2: Tensor, tables: SamplingTables, slots_R: Tensor, position_R: Tensor, features: Feature
) -> Tensor:
    """Return the winner of all ranks' winners, as `draw_part` returns them: int64 [R], -1 if there is none.

    Of equal ones it is the smaller token.
    """
    token_RN, score_RN = pairs_RN2[..., 0].long(), pairs_RN2[..., 1].contiguous().view(torch.float32)
    score_RN = torch.where(token_RN < 0, -torch.inf, score_RN)
    value_RN, none = score_RN, torch.iinfo(torch.int64).max
    if features & Feature.RANDOM:
        temperature_R1 = tables.temperature_S[slots_R][:, None]
        heat_R1 = torch.where(temperature_R1 > 0, temperature_R1, 1)
        warm_RN = (score_RN - score_RN.amax(-1, keepdim=True)) / heat_R1
        warm_RN = warm_RN + gumbel_of(tables.seed_S[slots_R], position_R, token_RN)
        value_RN = torch.where((temperature_R1 > 0) & score_RN.isfinite(), warm_RN, score_RN)
    is_best_RN = (value_RN == value_RN.amax(-1, keepdim=True)) & (token_RN >= 0)
    best_R = torch.where(is_best_RN, token_RN, none).amin(-1)
    return torch.where(best_R == none, -1, best_R)


DRAW_PART = Op(
    "draw_part",
    draw_part,
    (Implementation("triton", "ridgeline.kernels.sampling.triton_parts:draw_part", on_gpu),),
)

BEST_OF_PARTS = Op(
    "best_of_parts",
    best_of_parts,
    (Implementation("triton", "ridgeline.kernels.sampling.triton_parts:best_of_parts", on_gpu),),
)
