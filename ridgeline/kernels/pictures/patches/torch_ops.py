"""Patches in plain torch, written for CPUs. Some new lines are the product of a band of weights and the lines that they
are made of: float64 holds all sums exactly, and blocks stay in a core's cache. The legend is that of op.py, with

    Q  new lines, or new columns
    L  the old ones that these are made of
    R  a block of what is left as it is
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ridgeline.kernels.pictures.patches import op
from ridgeline.kernels.pictures.patches.tables import BITS, HALF, AxisTaps, ResizeStage, taps
from ridgeline.kernels.pictures.views import Box, Filter, Patching, View

LINES = 16  # of a band: more share more of their lines, and have more zeros among their weights
CACHED = 1 << 18  # numbers of a block


def patches(
    pixels_O: Tensor, sizes: Sequence[tuple[int, int]], views: Sequence[View], patching: Patching, dtype: torch.dtype
) -> Tensor:
    """Compute `op.patches`."""
    pictures = op.split(pixels_O, sizes)
    found = [op.cut(op.seen(pictures, view, patching, _resized), patching, dtype) for view in views]
    return torch.cat(found)


def _resized(x_HWC: Tensor, step: ResizeStage, inside: Box, filter: Filter) -> Tensor:
    """Return the rows and columns inside of a resized box. What these are not made of is left out."""
    if not inside.rows or not inside.columns:
        return x_HWC.new_empty(inside.rows, inside.columns, 3)
    across = _part(taps(step.box.columns, step.width, filter), inside.left, inside.columns)
    down = _part(taps(step.box.rows, step.height, filter), inside.top, inside.rows)
    if step.columns_first:
        left, right = _needed(across, x_HWC.shape[1])
        return _across(_along(x_HWC[:, left:right], down, 0), across, left)
    top, bottom = _needed(down, x_HWC.shape[0])
    return _along(_across(x_HWC[top:bottom], across, 0), down, top)


def _part(axis: AxisTaps, start: int, count: int) -> AxisTaps:
    return AxisTaps(axis.first_Q[start : start + count], axis.weights_QK[start : start + count])


def _needed(axis: AxisTaps, old: int) -> tuple[int, int]:
    """Return the first of the old pixels that are needed, and the one behind the last."""
    return int(axis.first_Q[0]), min(int(axis.first_Q[-1]) + axis.weights_QK.shape[1], old)


def _across(x_HWC: Tensor, axis: AxisTaps, skipped: int) -> Tensor:
    """Return new columns, made of columns of which `skipped` were left out before `x_HWC`."""
    if axis.weights_QK.shape[1] == 1:
        return x_HWC.index_select(1, torch.from_numpy(axis.first_Q - skipped))
    found = x_HWC.new_empty(len(x_HWC), len(axis.first_Q), 3)
    for new, old, weights_QL in _bands(axis, skipped, x_HWC.shape[1]):
        weights_LQ = weights_QL.T.contiguous()
        block = max(1, CACHED // (3 * len(weights_LQ)))
        for top in range(0, len(x_HWC), block):
            x_RCL = x_HWC[top : top + block, old].permute(0, 2, 1).double()
            found[top : top + block, new] = _rounded(x_RCL @ weights_LQ).permute(0, 2, 1).to(torch.uint8)
    return found


def _along(x: Tensor, axis: AxisTaps, skipped: int) -> Tensor:
    """Return new lines along the first axis, made of lines of which `skipped` were left out before `x`."""
    if axis.weights_QK.shape[1] == 1:
        return x.index_select(0, torch.from_numpy(axis.first_Q - skipped))
    x_LR = x.flatten(1)
    found = x.new_empty(len(axis.first_Q), x_LR.shape[1])
    for new, old, weights_QL in _bands(axis, skipped, len(x)):
        block = max(1, CACHED // weights_QL.shape[1])
        for left in range(0, x_LR.shape[1], block):
            right = left + block
            found[new, left:right] = _rounded(weights_QL @ x_LR[old, left:right].double()).to(torch.uint8)
    return found.view(-1, *x.shape[1:])


def _bands(axis: AxisTaps, skipped: int, old: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield some new lines, the old ones that they are made of, and their weights: [Q, L] float64. Weights past the
    last of the `old` lines are zeros."""
    first_Q, taps = axis.first_Q - skipped, axis.weights_QK.shape[1]
    for start in range(0, len(first_Q), LINES):
        new = slice(start, start + LINES)
        low = int(first_Q[new][0])
        band_QL = np.zeros((len(first_Q[new]), int(first_Q[new][-1]) + taps - low))
        band_QL[np.arange(len(band_QL))[:, None], (first_Q[new] - low)[:, None] + np.arange(taps)] = axis.weights_QK[
            new
        ]
        high = min(low + band_QL.shape[1], old)
        yield new, slice(low, high), torch.from_numpy(band_QL[:, : high - low])


def _rounded(sums: Tensor) -> Tensor:
    return sums.add_(HALF).mul_(1 / (1 << BITS)).floor_().clamp_(0, 255)
