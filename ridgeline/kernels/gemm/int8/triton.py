"""The op `w8a8_linear` on a GPU, by the kernels of gemm/fp8. One or two tokens are not rounded, nor is any token on
GPUs other than Hopper's.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.gemm.fp8 import products
from ridgeline.kernels.gemm.fp8.eight import Eight
from ridgeline.kernels.gemm.plain.levels import Levels


def w8a8_linear(x_TI: Tensor, weight: Levels, bias_O: Tensor | None) -> Tensor:
    """Compute `op.w8a8_linear`. No gradient passes."""
    return products.linear(x_TI, Eight(weight.level_OI, weight.scale_O), bias_O)


def invariant_linear(x_TI: Tensor, weight: Levels, bias_O: Tensor | None) -> Tensor:
    """Compute `op.w8a8_linear` with the same bits for a token whatever tokens stand beside it."""
    return products.invariant_linear(x_TI, Eight(weight.level_OI, weight.scale_O), bias_O)
