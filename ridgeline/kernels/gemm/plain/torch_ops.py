"""Linear maps through torch's own products.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.gemm.plain.op import in_three
from ridgeline.kernels.small.activation.torch_ops import gated_activation
from ridgeline.kernels.small.norm.torch_ops import rms_norm


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return F.linear(x_TI, weight_OI, bias_O)


norm_linear = in_three(rms_norm, linear, gated_activation)
