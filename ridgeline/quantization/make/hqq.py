"""HQQ (Badri and Shaji, Half-Quadratic Quantization of Large Machine Learning Models, 2023): scales that make the
rounding's error sparse, found from the weights alone.

It minimizes Σ |W - rounded(W)|^p with p < 1, which few large errors disturb less than a squared error. The error is
split off as a variable of its own, so that two steps with closed forms take turns: the split error is shrunk, and then
scales are fitted to what remains.

The method's own format keeps zeros as real numbers, and fits nothing else. None of the formats here do, so zeros are
rounded, and the scale is fitted too, by least squares. The best turn is kept.

Legend:
    I  inputs
    O  outputs
    J  inputs of a slab
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.quantization.make.grids import NumberGrid, Rounded, Scales, slab_width
from ridgeline.quantization.make.rtn import joined

POWER, TURNS = 0.7, 20
WEIGHT, GROWTH = 10.0, 1.01  # of the penalty that ties the split error to the real one, and how it grows


def half_quadratic(weight_OI: Tensor, grid: NumberGrid) -> Rounded:
    """Return the rounded matrix."""
    codes, found = [], []
    for slab_OJ in weight_OI.float().split(slab_width(grid, weight_OI.shape[1]), 1):
        scales = _fit(slab_OJ, grid)
        codes.append(grid.codes(slab_OJ, scales))
        found.append(scales)
    return Rounded(torch.cat(codes, 1), *joined(found))


def _fit(slab_OJ: Tensor, grid: NumberGrid) -> Scales:
    """Return the scales of the turn with the least error of each row."""
    scales = best = grid.fit(slab_OJ)
    least_O1 = torch.full_like(scales.scale, torch.inf)
    weight = WEIGHT
    for _ in range(TURNS):
        code_OJ = grid.codes(slab_OJ, scales)
        error_OJ = slab_OJ - grid.values(code_OJ, scales)
        now_O1 = error_OJ.abs().pow(POWER).sum(1, keepdim=True)
        better_O1 = now_O1 < least_O1
        least_O1 = torch.where(better_O1, now_O1, least_O1)
        best = scales.where(better_O1, best)
        scales = _turn(slab_OJ - _shrunk(error_OJ, weight), code_OJ, grid, scales)
        weight *= GROWTH
    return best


def _turn(target_OJ: Tensor, code_OJ: Tensor, grid: NumberGrid, scales: Scales) -> Scales:
    """Return the scales that suit these codes best."""
    zero_O1 = scales.zero
    if zero_O1 is not None:
        mean_O1 = (code_OJ - target_OJ / scales.scale).mean(1, keepdim=True)
        zero_O1 = mean_O1.round().clamp(1, float(code_OJ.max().clamp(min=1)))
    unit_OJ = grid.values(code_OJ, Scales(torch.ones_like(scales.scale), zero_O1))
    squares_O1 = unit_OJ.square().sum(1, keepdim=True)
    scale_O1 = (unit_OJ * target_OJ).sum(1, keepdim=True) / squares_O1.clamp(min=1e-12)
    stored_O1 = grid.stored(scale_O1.clamp(min=1e-30))
    return Scales(torch.where(scale_O1 > 0, stored_O1, scales.scale), zero_O1)


def _shrunk(error_OJ: Tensor, weight: float) -> Tensor:
    """Return the generalized soft threshold of the error."""
    size = error_OJ.abs()
    return error_OJ.sign() * (size - size.clamp(min=1e-12).pow(POWER - 1) / weight).clamp(min=0)
