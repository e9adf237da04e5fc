"""Weights rounded to int8, each row relative to its largest magnitude.

Legend:
    I  inputs
    J  inputs, filled up with zeros
    O  outputs
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.gemm.plain.levels import LEVELS

PIECE = 4096  # rows that are rounded at once, since rounding takes a float32 copy of them


def round_rows(weight_OI: Tensor, level_OJ: Tensor) -> Tensor:
    """Write a weight's levels to the first columns of `level_OJ` (int8), and return the scale of each output, in the
    weight's dtype. weight = level · scale, with an error of at most half a scale.

    The scale is rounded to the weight's dtype before the levels are computed, so its own error does not count: it moves
    the largest weight by a quarter of a step at most in bfloat16.
    """
    largest_O = weight_OI.detach().abs().amax(1).float()
    scale_O = (largest_O / LEVELS).clamp(min=torch.finfo(weight_OI.dtype).tiny).to(weight_OI.dtype)
    for rows, scale, level in zip(*(x.split(PIECE) for x in (weight_OI.detach(), scale_O, level_OJ)), strict=True):
        level[:, : rows.shape[1]] = (rows.float() / scale.float()[:, None]).round().clamp(-LEVELS, LEVELS)
    return scale_O
