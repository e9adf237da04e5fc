"""The gradients of RMSNorm, as an op of its own, which graphs of compilers call. The legend is that of op.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, on_gpu


def rms_norm_gradient(
    dy_TM: Tensor, ds_TM: Tensor | None, sum_TM: Tensor, weight_M: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of s, in its dtype, and of the weight, in that one's, of y = s / rms(s) * weight.

    dy_TM: the gradient of y. ds_TM: that which s has besides, None for none.
    """
    s_TM, dy_TM = sum_TM.float(), dy_TM.float()
    scale_T1 = torch.rsqrt(s_TM.square().mean(-1, keepdim=True) + eps)
    n_TM, dn_TM = s_TM * scale_T1, dy_TM * weight_M.float()
    dx_TM = scale_T1 * (dn_TM - n_TM * (dn_TM * n_TM).mean(-1, keepdim=True))
    if ds_TM is not None:
        dx_TM = dx_TM + ds_TM.float()
    dweight_M = (dy_TM * n_TM).flatten(0, -2).sum(0)
    return dx_TM.to(sum_TM.dtype), dweight_M.to(weight_M.dtype)


RMS_NORM_GRADIENT = Op(
    "rms_norm_gradient",
    rms_norm_gradient,
    (Implementation("triton_training", "ridgeline.kernels.small.norm.triton_training:rms_norm_gradient", on_gpu),),
)
