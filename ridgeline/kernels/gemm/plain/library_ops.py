"""Linear maps in graphs of torch's compilers. The legend is that of op.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ridgeline.kernels.base.library import Gradient, chosen, dense_like, expect, library_op
from ridgeline.kernels.gemm.plain.op import LINEAR, in_three
from ridgeline.kernels.small.activation.library_ops import gated_activation
from ridgeline.kernels.small.norm.library_ops import rms_norm_of


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_TI, weight_OI, bias_O = inputs
    ctx.save_for_backward(x_TI, weight_OI)
    ctx.biased = bias_O is not None


def _backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
    """Products of torch, which a compiler may fuse with what is beside them."""
    x_TI, weight_OI = ctx.saved_tensors
    wants_x, wants_weight, _ = ctx.needs_input_grad
    return (
        dy_TO @ weight_OI if wants_x else None,
        dy_TO.mT @ x_TI if wants_weight else None,
        dy_TO.sum(0) if ctx.biased else None,
    )


def _fake(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return dense_like(x_TI, x_TI.shape[0], weight_OI.shape[0])


@library_op(fake=_fake, gradient=Gradient(_keep, _backward))
def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return `op.linear`."""
    fits = x_TI.ndim == 2 and weight_OI.ndim == 2 and x_TI.shape[1] == weight_OI.shape[1]
    fits &= bias_O is None or bias_O.shape == weight_OI.shape[:1]
    given = (x_TI, weight_OI) if bias_O is None else (x_TI, weight_OI, bias_O)
    expect(fits, "linear", "x [T, I], a weight [O, I] and a bias [O]", *given)
    return chosen(LINEAR, x_TI)(x_TI, weight_OI, bias_O).contiguous()


norm_linear_of = in_three(rms_norm_of, linear, gated_activation)
