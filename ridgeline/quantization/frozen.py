"""Weights that do not learn, with gradients of what they multiply. A matrix in codes becomes plain numbers while its
product's gradient is computed, one matrix at a time, so a model's never exist together.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.kernels.gemm.codes.op import Coded
from ridgeline.kernels.gemm.plain.levels import Levels
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.quantization.joined import JoinedWeight
from ridgeline.quantization.weight import FormedWeight, Weight, WrappedWeight


def numbers_of(weight: FormedWeight, dtype: torch.dtype) -> Tensor:
    """Return a matrix as plain numbers: [O, I]. Those of codes on a GPU lie in memory that the next call overwrites."""
    form = weight.form
    if isinstance(form, Tensor):
        return form.to(dtype)
    if isinstance(form, Coded) and form.code_OB.is_cuda and form.order_I is None and dtype != torch.float64:
        # Triton, which is imported only where it runs
        from ridgeline.kernels.gemm.codes.dequantize import dequantize

        return dequantize(form, dtype)
    assert isinstance(form, Coded | Levels)
    return form.dequantized().to(dtype)


def adds(weight: Weight, x_TI: Tensor) -> bool:
    """Return True if `add_product` takes this weight. In codes it is dequantized whole, which suits GPUs alone."""
    return isinstance(weight, FormedWeight) and (x_TI.is_cuda or isinstance(weight.form, Tensor))


def add_product(weight: Weight, x_TI: Tensor, to_TO: Tensor) -> None:
    """Add x · weightᵀ to a tensor of x's dtype."""
    assert isinstance(weight, FormedWeight)
    to_TO.addmm_(x_TI, numbers_of(weight, x_TI.dtype).T)


def add_input_gradient(weight: Weight, grad_TO: Tensor, to_TI: Tensor) -> None:
    """Add the gradient of a product's input to a tensor of the dtype of its output's gradient."""
    if not isinstance(weight, JoinedWeight):
        assert isinstance(weight, FormedWeight)
        to_TI.addmm_(grad_TO, numbers_of(weight, grad_TO.dtype))
        return
    sizes = [each.stored.shape[0] for each in weight.weights]
    for each, part_TO in zip(weight.weights, grad_TO.split(sizes, 1), strict=True):
        add_input_gradient(each, part_TO, to_TI)


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight: Weight, bias_O: Tensor | None) -> Tensor:
        ctx.weight, ctx.dtype, ctx.shape = weight, x_TI.dtype, x_TI.shape
        return weight.linear(x_TI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        grad_TI = grad_TO.new_zeros(ctx.shape)
        add_input_gradient(ctx.weight, grad_TO, grad_TI)
        return grad_TI.to(ctx.dtype), None, None


@dataclass(frozen=True)
class FrozenWeight(WrappedWeight):
    """A weight in codes that does not learn. Its product has a gradient of the input alone."""

    def linear(self, x_TI: Tensor | Rounded, bias_O: Tensor | None) -> Tensor:
        assert isinstance(x_TI, Tensor)  # there is no buffer
        found: Tensor = _FrozenProduct.apply(x_TI, self.inner, bias_O)
        return found
