"""Activations in graphs of torch's compilers. The legend is that of op.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ridgeline.kernels.base.library import Gradient, chosen, dense_like, expect, library_op
from ridgeline.kernels.small.activation.gradient import GATED_ACTIVATION_GRADIENT
from ridgeline.kernels.small.activation.op import ACTIVATION, GATED_ACTIVATION


@library_op(fake=lambda x_TF, kind: dense_like(x_TF))
def activation(x_TF: Tensor, kind: str) -> Tensor:
    """Return `op.activation`. It has no gradient."""
    return chosen(ACTIVATION, x_TF)(x_TF, kind).contiguous()


@library_op(fake=lambda x_T2F, dy_TF, kind: dense_like(x_T2F))
def gated_activation_gradient(x_T2F: Tensor, dy_TF: Tensor, kind: str) -> Tensor:
    """Return the gradients of both halves."""
    halves = (*dy_TF.shape[:-1], 2 * dy_TF.shape[-1])
    expect(x_T2F.shape == halves, "gated_activation_gradient", "x twice as wide as its gradient", x_T2F, dy_TF)
    return chosen(GATED_ACTIVATION_GRADIENT, x_T2F)(x_T2F.contiguous(), dy_TF.contiguous(), kind)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_T2F, ctx.kind = inputs
    ctx.save_for_backward(x_T2F)


def _backward(ctx: Any, dy_TF: Tensor) -> tuple[Tensor, None]:
    (x_T2F,) = ctx.saved_tensors
    return gated_activation_gradient(x_T2F, dy_TF, ctx.kind), None


def _fake(x_T2F: Tensor, kind: str) -> Tensor:
    return dense_like(x_T2F, *x_T2F.shape[:-1], x_T2F.shape[-1] // 2)


@library_op(fake=_fake, gradient=Gradient(_keep, _backward))
def gated_activation(x_T2F: Tensor, kind: str) -> Tensor:
    """Return `op.gated_activation`."""
    fits = x_T2F.ndim > 0 and x_T2F.shape[-1] % 2 == 0
    expect(fits, "gated_activation", "two halves of equal width", x_T2F)
    return chosen(GATED_ACTIVATION, x_T2F)(x_T2F, kind).contiguous()
