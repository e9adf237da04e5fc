"""Factors that move the difficulty of rounding between a linear map's inputs and its weight: inputs are divided by them
and the weight's columns are multiplied by them, so the product stays the same.

SmoothQuant (Xiao et al., arXiv 2211.10438) makes inputs easier to round: factor = max|x|^alpha / max|w|^(1 - alpha).
AWQ (Lin et al., arXiv 2306.00978) makes the weights that matter rounder: factor = mean|x|^ratio, with the ratio that
gives the least error of the outputs.

Legend:
    I  inputs
    O  outputs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ridgeline.quantization.make.grids import NumberGrid, dequantized
from ridgeline.quantization.make.rtn import round_to_nearest
from ridgeline.quantization.make.statistics import InputStatistics, pooled

RATIOS = tuple(step / 20 for step in range(20))
LEAST = 1e-5


def smoothing_factors(weights: Sequence[Tensor], seen: Sequence[InputStatistics], alpha: float) -> Tensor:
    """Return SmoothQuant's factors of the inputs that all these matrices share."""
    inputs_I = pooled(list(seen)).largest_I
    weights_I = torch.stack([weight_OI.float().abs().amax(0) for weight_OI in weights]).amax(0)
    factor_I = inputs_I.clamp(min=LEAST).pow(alpha) / weights_I.clamp(min=LEAST).pow(1 - alpha)
    return torch.where((inputs_I == 0) | (weights_I == 0), 1.0, factor_I.clamp(min=LEAST))


def searched_factors(
    weights: Sequence[Tensor], seen: Sequence[InputStatistics], grid: NumberGrid, tie: Callable[[Tensor], Tensor]
) -> tuple[Tensor, float]:
    """Return AWQ's factors and their ratio; the ratio 0 is no factors at all.

    tie: makes factors equal where they must be.

    The error is that of the outputs, for which the paper runs a layer again and again. The inputs' Hessian gives the
    same number without a run.
    """
    mean_I = pooled(list(seen)).mean_I
    best_I, best_ratio, least = torch.ones_like(mean_I), 0.0, torch.inf
    for ratio in RATIOS:
        factor_I = tie(mean_I.clamp(min=LEAST).pow(ratio))
        factor_I = factor_I / (factor_I.max() * factor_I.min()).sqrt()
        error = sum(float(_error(w, s, grid, factor_I)) for w, s in zip(weights, seen, strict=True) if s.tokens)
        if error < least:
            best_I, best_ratio, least = factor_I, ratio, error
    return best_I, best_ratio


def _error(weight_OI: Tensor, seen: InputStatistics, grid: NumberGrid, factor_I: Tensor) -> Tensor:
    scaled_OI = weight_OI.float() * factor_I
    own = grid.fitted(scaled_OI)
    return seen.squared_error(dequantized(own, round_to_nearest(scaled_OI, own)) / factor_I - weight_OI.float())
