"""Linear maps by oneDNN's products of 8-bit levels. The weight is packed once. The legend is that of op.py."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ridgeline.kernels.base.onednn import in_large_pages
from ridgeline.kernels.gemm.int8.op import MIDDLE
from ridgeline.kernels.gemm.plain.levels import LEVELS, Levels


def pack(level_OI: Tensor) -> Tensor:
    """Return a weight's levels in oneDNN's layout, which is read as [I, O]."""
    return in_large_pages(torch.ops.onednn.qlinear_prepack(level_OI, None))


def w8a8_linear(x_TI: Tensor, weight: Levels, bias_O: Tensor | None) -> Tensor:
    """Compute `op.w8a8_linear`. Levels that are not packed yet are packed for this call alone."""
    level_OI, scale_O, _ = weight
    packed = level_OI if level_OI.is_mkldnn else pack(level_OI)
    scale_T1 = x_TI.abs().amax(-1, keepdim=True).float().div_(LEVELS)
    # This rounds halves up, since all values are above zero. The levels of a row of zeros are undefined, but its scale
    # is zero.
    level_TI = (x_TI.float() / scale_T1).add_(MIDDLE + 0.5).to(torch.uint8)
    y_TO = torch.ops.onednn.qlinear_pointwise(
        level_TI, 1.0, MIDDLE, packed, scale_O, _zeros(len(scale_O)), None, 1.0, 0, torch.float32, "none", [], ""
    )
    y_TO = y_TO.mul_(scale_T1).to(x_TI.dtype)
    return y_TO if bias_O is None else y_TO + bias_O


@cache
def _zeros(outputs: int) -> Tensor:
    """Return the level that stands for zero in each output's weights: 0."""
    return torch.zeros(outputs, dtype=torch.int64)
