"""Linear maps through torch's own products.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ridgeline.kernels.gemm.plain.op import in_three
from ridgeline.kernels.small.activation.torch_ops import gated_activation
from ridgeline.kernels.small.norm.torch_ops import rms_norm


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return F.linear(x_TI, weight_OI, bias_O)


def weight_gradient(grad_TO: Tensor, x_TI: Tensor, dtype: torch.dtype) -> Tensor:
    """Return gradᵀ · x, [O, I], of which a GPU writes the wide sums."""
    if grad_TO.is_cuda and grad_TO.itemsize == 2 and dtype == torch.float32:
        found: Tensor = torch.mm(grad_TO.T, x_TI, out_dtype=dtype)
        return found
    return (grad_TO.T @ x_TI).to(dtype)


class _Learnt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
        narrow_OI, ctx.dtypes = weight_OI.to(dtype), (weight_OI.dtype, None if bias_O is None else bias_O.dtype)
        ctx.save_for_backward(x_TI, narrow_OI)
        with torch.autocast(x_TI.device.type, enabled=False):
            return F.linear(x_TI, narrow_OI, None if bias_O is None else bias_O.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, narrow_OI = ctx.saved_tensors
        of_weight, of_bias = ctx.dtypes
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        grad_TI = grad_TO @ narrow_OI if wants_x else None
        grad_OI = weight_gradient(grad_TO, x_TI, of_weight) if wants_weight else None
        return grad_TI, grad_OI, grad_TO.sum(0).to(of_bias) if wants_bias else None, None


def learnt_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Compute `linear`. Under autocast a weight that learns gets its gradient in its own type at once, and not as a
    copy of one in the type of products."""
    kind = x_TI.device.type
    if x_TI.ndim != 2 or not (torch.is_autocast_enabled(kind) and weight_OI.requires_grad and torch.is_grad_enabled()):
        return linear(x_TI, weight_OI, bias_O)
    dtype = torch.get_autocast_dtype(kind)
    found: Tensor = _Learnt.apply(x_TI.to(dtype), weight_OI, bias_O, dtype)
    return found


norm_linear = in_three(rms_norm, linear, gated_activation)
