"""Patches in plain torch, written for CPUs: integers, one tap after the other. The legend is that of op.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.kernels.pictures.patches import op
from ridgeline.kernels.pictures.patches.tables import BITS, HALF, AxisTaps, ResizeStage, taps
from ridgeline.kernels.pictures.views import Box, Filter, Patching, View

CACHED = 1 << 17  # numbers of a block of new lines, which with the old ones stay in a core's cache


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
    """Return new columns. Lines are contiguous while they are summed."""
    return _along(x_HWC.transpose(0, 1).contiguous(), axis, skipped).transpose(0, 1).contiguous()


def _along(x: Tensor, axis: AxisTaps, skipped: int) -> Tensor:
    """Return new lines along the first axis, made of lines of which `skipped` were left out before `x`."""
    first_Q = axis.first_Q - skipped
    first, weights = (torch.from_numpy(each).to(x.device) for each in (first_Q, axis.weights_QK))
    if weights.shape[1] == 1:
        return x.index_select(0, first)
    found = x.new_empty(len(first), *x.shape[1:])
    block = max(1, CACHED // max(1, x[0].numel()))
    for start in range(0, len(first), block):
        part, weights_QK = slice(start, start + block), weights[start : start + block]
        low = int(first_Q[part][0])
        x_part = x[low : int(first_Q[part][-1]) + weights.shape[1]].int()
        total = torch.full((len(weights_QK), *x.shape[1:]), HALF, dtype=torch.int32, device=x.device)
        for tap in range(weights.shape[1]):
            lines = (first[part] - low + tap).clamp(max=len(x_part) - 1)  # past the last one weights are zero
            total.addcmul_(x_part.index_select(0, lines), weights_QK[:, tap, None, None])
        found[part] = (total >> BITS).clamp_(0, 255)
    return found
