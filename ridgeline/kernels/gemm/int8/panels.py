"""Linear maps of 8-bit levels by the C++ of kernels/gemm/codes. The legend is that of op.py."""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.gemm.codes.panels import linear, pack_levels
from ridgeline.kernels.gemm.int8 import onednn, op
from ridgeline.kernels.gemm.plain.levels import Levels

_HERE = Platform(device_type="cpu")


def w8a8_linear(x_TI: Tensor, weight: Levels, bias_O: Tensor | None) -> Tensor:
    """Compute `op.w8a8_linear`. The levels are laid out for this call alone; without a compiler oneDNN multiplies them,
    or the reference."""
    packed = None if weight.level_OI.is_mkldnn else pack_levels(weight)
    if packed is not None:
        return linear(x_TI, packed, bias_O)
    return (onednn if op.has_vnni(_HERE) else op).w8a8_linear(x_TI, weight, bias_O)
