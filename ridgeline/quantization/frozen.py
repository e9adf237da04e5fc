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
from ridgeline.kernels.ops import Ops
from ridgeline.quantization.joined import JoinedWeight
from ridgeline.quantization.weight import FormedWeight, Weight


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


def input_gradient(weight: Weight, grad_TO: Tensor) -> Tensor:
    """Return the gradient of a product's input, [T, I], from that of its output."""
    if not isinstance(weight, JoinedWeight):
        assert isinstance(weight, FormedWeight)
        return grad_TO @ numbers_of(weight, grad_TO.dtype)
    sizes = [each.stored.shape[0] for each in weight.weights]
    grad_TI = None
    for each, part_TO in zip(weight.weights, grad_TO.split(sizes, 1), strict=True):
        assert isinstance(each, FormedWeight)
        found = part_TO @ numbers_of(each, grad_TO.dtype)
        grad_TI = found if grad_TI is None else grad_TI.add_(found)
    assert grad_TI is not None
    return grad_TI


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight: Weight, bias_O: Tensor | None) -> Tensor:
        ctx.weight, ctx.dtype = weight, x_TI.dtype
        return weight.linear(x_TI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        return input_gradient(ctx.weight, grad_TO).to(ctx.dtype), None, None


@dataclass(frozen=True)
class FrozenWeight(Weight):
    """A weight in codes that does not learn. Its product has a gradient of the input alone."""

    ops: Ops
    inner: Weight

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    @property
    def stored(self) -> Tensor:
        return self.inner.stored

    def linear(self, x_TI: Tensor | Rounded, bias_O: Tensor | None) -> Tensor:
        assert isinstance(x_TI, Tensor)  # there is no buffer
        found: Tensor = _Product.apply(x_TI, self.inner, bias_O)
        return found
