"""The FP8 ops with the same bits for a token, however many tokens stand beside it. Activations are left as they are.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.gemm.fp8.op import Fp8, in_buffer
from ridgeline.kernels.gemm.fp8.products import invariant_linear
from ridgeline.kernels.gemm.fp8.triton import eight
from ridgeline.kernels.gemm.plain.op import in_three
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.small.activation.triton import gated_activation
from ridgeline.kernels.small.norm.triton import rms_norm


def fp8_linear(x_TI: Tensor | Rounded, weight: Fp8, bias_O: Tensor | None) -> Tensor:
    """Compute `op.fp8_linear`."""
    x_TI = x_TI.wide().to(x_TI.dtype) if isinstance(x_TI, Rounded) else x_TI
    return invariant_linear(x_TI, eight(weight), bias_O)


fp8_norm_linear = in_three(rms_norm, fp8_linear, gated_activation, in_buffer)
