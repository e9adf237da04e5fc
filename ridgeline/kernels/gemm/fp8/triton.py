"""The FP8 ops on a GPU. If a gradient is wanted, torch's own kernels run, since these have none.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.gemm.fp8 import products, torch_ops
from ridgeline.kernels.gemm.fp8.eight import Eight
from ridgeline.kernels.gemm.fp8.op import Fp8
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand
from ridgeline.kernels.gemm.plain.rounded import Rounded


def fp8_linear(x_TI: Tensor | Rounded, weight: Fp8, bias_O: Tensor | None) -> Tensor:
    """Compute `op.fp8_linear`."""
    if torch.is_grad_enabled() and isinstance(x_TI, Tensor) and x_TI.requires_grad:
        return torch_ops.fp8_linear(x_TI, weight, bias_O)
    return products.linear(x_TI, eight(weight), bias_O)


def fp8_norm_linear(x: Operand, weight: Fp8, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
    """Compute `op.fp8_norm_linear`."""
    if torch.is_grad_enabled() and x.x_TI.requires_grad:
        return torch_ops.fp8_norm_linear(x, weight, epilogue)
    return products.norm_linear(x, eight(weight), epilogue)


def takes_rounded(weight: Fp8, tokens: int, dtype: torch.dtype) -> bool:
    """Return True if activations of `dtype` are best rounded by the op before, with a scale for each 128 inputs."""
    return products.takes_rounded(eight(weight), tokens, dtype)


def rounds_gated(weight: Fp8, tokens: int, dtype: torch.dtype) -> bool:
    """Return True if the kernel of a gated product rounds its own results."""
    return products.rounds_gated(eight(weight), tokens, dtype)


def eight(weight: Fp8) -> Eight:
    """Return the weight as the kernels take it."""
    how = weight.format
    return Eight(
        weight.weight_OI.contiguous(), weight.scale_SC.contiguous(), how.block, how.activations, weight.x_scale
    )
