"""The FP8 ops with the same bits for a token, however many tokens stand beside it. Activations are left as they are.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.activation.triton import gated_activation
from ridgeline.kernels.fp8_gemm.op import Fp8
from ridgeline.kernels.fp8_gemm.products import invariant_linear
from ridgeline.kernels.fp8_gemm.triton import eight
from ridgeline.kernels.norm.triton import rms_norm


def fp8_linear(x_TI: Tensor, weight: Fp8, bias_O: Tensor | None) -> Tensor:
    """Compute `op.fp8_linear`."""
    return invariant_linear(x_TI, eight(weight), bias_O)


def fp8_norm_linear(
    x_TI: Tensor,
    residual_TI: Tensor | None,
    norm_weight_I: Tensor,
    eps: float,
    weight: Fp8,
    bias_O: Tensor | None,
    gate: str | None,
) -> tuple[Tensor, Tensor]:
    """Compute `op.fp8_norm_linear`."""
    n_TI, s_TI = rms_norm(x_TI, residual_TI, norm_weight_I, eps)
    y_TO = fp8_linear(n_TI, weight, bias_O)
    return (gated_activation(y_TO, gate) if gate else y_TO), s_TI
