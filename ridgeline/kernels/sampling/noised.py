"""Logits with the noise of a draw, for callers that need more than the token drawn. The largest number belongs to that
token, the second largest to the token that would be drawn in its place, and so on.

Legend:
    S  slots
    R  rows
    V  vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, on_gpu
from ridgeline.kernels.base.rows import Feature
from ridgeline.kernels.sampling.op import SamplingTables
from ridgeline.kernels.sampling.philox import gumbel
from ridgeline.kernels.sampling.torch_ops import ADJUSTING, adjusted


def noised(logits_RV: Tensor, tables: SamplingTables, slots_R: Tensor, position_R: Tensor, features: Feature) -> Tensor:
    """Return the numbers of which `op.sample_reference` takes the largest, less a number for each row: float32 [R, V].
    Filters are left out. Greedy rows have no noise."""
    if features & ADJUSTING:
        logits_RV = adjusted(logits_RV, tables, slots_R, position_R, features)
    logits_RV = logits_RV.float()
    logits_RV = logits_RV - logits_RV.amax(-1, keepdim=True)
    if not features & Feature.RANDOM:
        return logits_RV
    temperature_R1 = tables.temperature_S[slots_R][:, None]
    noise_RV = gumbel(tables.seed_S[slots_R], position_R, logits_RV.shape[1])
    warm_RV = logits_RV / torch.where(temperature_R1 > 0, temperature_R1, 1) + noise_RV
    return torch.where(temperature_R1 > 0, warm_RV, logits_RV)


NOISED = Op(
    "noised",
    noised,
    (Implementation("triton", "ridgeline.kernels.sampling.triton_noised:noised", on_gpu),),
)
