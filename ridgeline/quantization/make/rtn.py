"""Round-to-nearest: every weight becomes the nearest number of the grid.

With `importance_I` the range of each slab is also shrunk while that lessens the squared error, in which inputs count by
importance. Weights beyond the range are then clipped (the search of OCS and OMSE, and of AWQ's clipping).

Legend:
    I  inputs
    O  outputs
    J  inputs of a slab
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.quantization.make.grids import NumberGrid, Rounded, Scales, slab_width

SHRINKS = tuple(1 - step / 40 for step in range(21))  # 1 … 0.5


def round_to_nearest(weight_OI: Tensor, grid: NumberGrid, importance_I: Tensor | None = None) -> Rounded:
    """Return the rounded matrix, with searched ranges if there is an importance of each input."""
    width = slab_width(grid, weight_OI.shape[1])
    codes, found = [], []
    for start in range(0, weight_OI.shape[1], width):
        slab_OJ = weight_OI[:, start : start + width].float()
        scales = fit(slab_OJ, grid, None if importance_I is None else importance_I[start : start + width])
        codes.append(grid.codes(slab_OJ, scales))
        found.append(scales)
    return Rounded(torch.cat(codes, 1), *joined(found))


def joined(found: list[Scales]) -> tuple[Tensor, Tensor | None]:
    """Return the slabs' scales and zeros side by side: [O, G]."""
    zeros = [scales.zero for scales in found if scales.zero is not None]
    return torch.cat([scales.scale for scales in found], 1), torch.cat(zeros, 1) if zeros else None


def fit(slab_OJ: Tensor, grid: NumberGrid, importance_J: Tensor | None) -> Scales:
    """Return the scales of a slab."""
    if importance_J is None:
        return grid.fit(slab_OJ)
    best = grid.fit(slab_OJ)
    least_O1 = _error(slab_OJ, grid, best, importance_J)
    for shrink in SHRINKS[1:]:
        tried = grid.fit(slab_OJ, shrink)
        error_O1 = _error(slab_OJ, grid, tried, importance_J)
        better_O1 = error_O1 < least_O1
        least_O1 = torch.where(better_O1, error_O1, least_O1)
        best = tried.where(better_O1, best)
    return best


def _error(slab_OJ: Tensor, grid: NumberGrid, scales: Scales, importance_J: Tensor) -> Tensor:
    change_OJ = grid.values(grid.codes(slab_OJ, scales), scales) - slab_OJ
    return (change_OJ.square() * importance_J).sum(1, keepdim=True)
