"""The norms in graphs of torch's compilers. The legend is that of op.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.base.library import Gradient, chosen, dense_like, expect, library_op
from ridgeline.kernels.small.norm.gradient import RMS_NORM_GRADIENT
from ridgeline.kernels.small.norm.op import LAYER_NORM, RMS_NORM


def _check(op: str, x_TM: Tensor, residual_TM: Tensor | None, *weights: Tensor) -> None:
    fits = x_TM.ndim > 0 and all(each.shape == x_TM.shape[-1:] for each in weights)
    fits &= residual_TM is None or (residual_TM.shape == x_TM.shape and residual_TM.dtype == x_TM.dtype)
    residuals = () if residual_TM is None else (residual_TM,)
    expect(fits, op, "x, a residual like x, and weights of its last dimension", x_TM, *residuals, *weights)


def _fake_gradient(
    dy_TM: Tensor, ds_TM: Tensor | None, sum_TM: Tensor, weight_M: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return dense_like(sum_TM), dense_like(weight_M)


@library_op(fake=_fake_gradient)
def rms_norm_gradient(
    dy_TM: Tensor, ds_TM: Tensor | None, sum_TM: Tensor, weight_M: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sum and of the weight."""
    _check("rms_norm_gradient", sum_TM, None, weight_M)
    expect(dy_TM.shape == sum_TM.shape, "rms_norm_gradient", "a gradient like the sum", dy_TM, sum_TM)
    ds_TM = None if ds_TM is None else ds_TM.contiguous()
    return chosen(RMS_NORM_GRADIENT, sum_TM)(dy_TM.contiguous(), ds_TM, sum_TM.contiguous(), weight_M, eps)


def _keep_alone(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_TM, weight_M, ctx.eps = inputs
    ctx.save_for_backward(x_TM, weight_M)


def _alone_backward(ctx: Any, dy_TM: Tensor) -> tuple[Tensor | None, ...]:
    x_TM, weight_M = ctx.saved_tensors
    return *rms_norm_gradient(dy_TM, None, x_TM, weight_M, ctx.eps), None


@library_op(fake=lambda x_TM, weight_M, eps: dense_like(x_TM), gradient=Gradient(_keep_alone, _alone_backward))
def rms_norm(x_TM: Tensor, weight_M: Tensor, eps: float) -> Tensor:
    """Return `op.rms_norm`'s y without a residual."""
    _check("rms_norm", x_TM, None, weight_M)
    return chosen(RMS_NORM, x_TM)(x_TM, None, weight_M, eps)[0].contiguous()


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    weight_M, ctx.eps = inputs[2:]
    ctx.save_for_backward(output[1], weight_M)
    ctx.set_materialize_grads(False)


def _sum_backward(ctx: Any, dy_TM: Tensor | None, ds_TM: Tensor | None) -> tuple[Tensor | None, ...]:
    sum_TM, weight_M = ctx.saved_tensors
    if dy_TM is None:
        return ds_TM, ds_TM, None, None
    dx_TM, dweight_M = rms_norm_gradient(dy_TM, ds_TM, sum_TM, weight_M, ctx.eps)
    return dx_TM, dx_TM, dweight_M, None


def _fake_sum(x_TM: Tensor, residual_TM: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return dense_like(x_TM), dense_like(x_TM)


@library_op(fake=_fake_sum, gradient=Gradient(_keep_sum, _sum_backward))
def add_rms_norm(x_TM: Tensor, residual_TM: Tensor, weight_M: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `op.rms_norm`'s (y, s) with a residual."""
    _check("add_rms_norm", x_TM, residual_TM, weight_M)
    y_TM, s_TM = chosen(RMS_NORM, x_TM)(x_TM, residual_TM, weight_M, eps)
    return y_TM.contiguous(), s_TM.contiguous()


@library_op(fake=lambda x_TM, *_: dense_like(x_TM))
def layer_norm(x_TM: Tensor, weight_M: Tensor, bias_M: Tensor, eps: float) -> Tensor:
    """Return `op.layer_norm`'s y without a residual. It has no gradient."""
    _check("layer_norm", x_TM, None, weight_M, bias_M)
    return chosen(LAYER_NORM, x_TM)(x_TM, None, weight_M, bias_M, eps)[0].contiguous()


@library_op(fake=_fake_sum)
def add_layer_norm(
    x_TM: Tensor, residual_TM: Tensor, weight_M: Tensor, bias_M: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return `op.layer_norm`'s (y, s) with a residual. It has no gradient."""
    _check("add_layer_norm", x_TM, residual_TM, weight_M, bias_M)
    y_TM, s_TM = chosen(LAYER_NORM, x_TM)(x_TM, residual_TM, weight_M, bias_M, eps)
    return y_TM.contiguous(), s_TM.contiguous()


def rms_norm_of(x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `op.rms_norm` by registered ops."""
    if residual_TM is None:
        return rms_norm(x_TM, weight_M, eps), x_TM
    return add_rms_norm(x_TM, residual_TM, weight_M, eps)


def layer_norm_of(
    x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, bias_M: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute `op.layer_norm` by registered ops."""
    if residual_TM is None:
        return layer_norm(x_TM, weight_M, bias_M, eps), x_TM
    return add_layer_norm(x_TM, residual_TM, weight_M, bias_M, eps)


def differentiated(x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `rms_norm_of` as the kernels of training do: under autocast y has the type of products, and the sum the
    wider one of x and the residual."""
    kind, given = x_TM.device.type, x_TM
    narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_TM.dtype
    if residual_TM is not None:
        wide = torch.promote_types(x_TM.dtype, residual_TM.dtype)
        x_TM, residual_TM = x_TM.to(wide), residual_TM.to(wide)
    y_TM, s_TM = rms_norm_of(x_TM, residual_TM, weight_M, eps)
    return y_TM.to(narrow), given if residual_TM is None else s_TM
