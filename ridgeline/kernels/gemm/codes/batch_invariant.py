"""Linear maps of weights in codes whose result for a token does not depend on the tokens beside it: one way to cut the
inputs for each matrix, whatever the tokens. Many tokens cost more than the other implementation's.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.gemm.codes.dequantize import dequantize
from ridgeline.kernels.gemm.codes.op import Coded
from ridgeline.kernels.gemm.codes.triton import from_fragments, ordered
from ridgeline.kernels.gemm.plain import batch_invariant as gemm
from ridgeline.kernels.gemm.plain.op import in_three
from ridgeline.kernels.small.activation.triton import gated_activation
from ridgeline.kernels.small.norm.triton import rms_norm


def coded_linear(x_TI: Tensor, weight: Coded, bias_O: Tensor | None) -> Tensor:
    """Compute `op.coded_linear`."""
    x_TI = ordered(x_TI, weight)
    y_TO = from_fragments(x_TI, weight, bias_O, None, same=True)
    return gemm.linear(x_TI, dequantize(weight, x_TI.dtype), bias_O) if y_TO is None else y_TO


coded_norm_linear = in_three(rms_norm, coded_linear, gated_activation)
