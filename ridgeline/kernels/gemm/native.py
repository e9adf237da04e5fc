"""A norm and a linear map through torch's own kernels. Legend: T tokens, I inputs, O outputs."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.activation.native import gated_activation
from ridgeline.kernels.norm.native import rms_norm


def norm_linear(
    x_TI: Tensor,
    residual_TI: Tensor | None,
    norm_weight_I: Tensor,
    eps: float,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    gate: str | None,
) -> tuple[Tensor, Tensor]:
    """As `ridgeline.kernels.gemm.op.norm_linear`, rounding between the parts; differentiable."""
    n_TI, s_TI = rms_norm(x_TI, residual_TI, norm_weight_I, eps)
    y_TO = F.linear(n_TI, weight_OI, bias_O)
    return (gated_activation(y_TO, gate) if gate else y_TO), s_TI
