"""Norms with the residual addition fused in.

RMSNorm: Zhang and Sennrich, arXiv 1910.07467. LayerNorm: Ba, Kiros and Hinton, arXiv 1607.06450.

Legend:
    T  tokens (or any leading dimensions)
    M  normalised width
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, on_cpu, on_gpu


def rms_norm(x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (y, s), both with the shape and dtype of `x_TM`. s = x + residual rounded to x's dtype, or s = x if there
    is no residual. y = s / rms(s) * weight."""
    sum_TM = x_TM if residual_TM is None else x_TM + residual_TM
    s_TM = sum_TM.float()
    y_TM = s_TM * torch.rsqrt(s_TM.square().mean(-1, keepdim=True) + eps) * weight_M.float()
    return y_TM.to(x_TM.dtype), sum_TM


def layer_norm(
    x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, bias_M: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (y, s), both with the shape and dtype of `x_TM`. s = x + residual rounded to x's dtype, or s = x if there
    is no residual. y = (s - mean) / std * weight + bias."""
    sum_TM = x_TM if residual_TM is None else x_TM + residual_TM
    s_TM = sum_TM.float()
    centred_TM = s_TM - s_TM.mean(-1, keepdim=True)
    scale_T1 = torch.rsqrt(centred_TM.square().mean(-1, keepdim=True) + eps)
    y_TM = centred_TM * scale_T1 * weight_M.float() + bias_M.float()
    return y_TM.to(x_TM.dtype), sum_TM


RMS_NORM = Op(
    "rms_norm",
    rms_norm,
    (
        Implementation("triton", "ridgeline.kernels.small.norm.triton:rms_norm", on_gpu),
        Implementation("torch", "ridgeline.kernels.small.norm.torch_ops:rms_norm"),
        Implementation("triton_training", "ridgeline.kernels.small.norm.triton_training:rms_norm", on_gpu),
        Implementation("fixed_tiles", "ridgeline.kernels.small.norm.fixed_tiles:rms_norm", on_cpu),
    ),
)
LAYER_NORM = Op(
    "layer_norm",
    layer_norm,
    (
        Implementation("triton", "ridgeline.kernels.small.norm.triton:layer_norm", on_gpu),
        Implementation("torch", "ridgeline.kernels.small.norm.torch_ops:layer_norm"),
        Implementation("fixed_tiles", "ridgeline.kernels.small.norm.fixed_tiles:layer_norm", on_cpu),
    ),
)
