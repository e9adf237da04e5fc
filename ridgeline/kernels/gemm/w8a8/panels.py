"""Linear maps of 8-bit levels by the C++ of kernels/gemm/codes. The legend is that of op.py."""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.gemm.codes.panels import linear, pack_levels
from ridgeline.kernels.gemm.w8a8 import op


def w8a8_linear(x_TI: Tensor, level_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None) -> Tensor:
    """Compute `op.w8a8_linear`. The levels are laid out for this call alone; without a compiler the reference
    multiplies them."""
    packed = None if level_OI.is_mkldnn else pack_levels(level_OI, scale_O)
    if packed is None:
        return op.w8a8_linear(x_TI, level_OI, scale_O, bias_O)
    return linear(x_TI, packed, bias_O)
