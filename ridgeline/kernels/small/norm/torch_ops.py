"""Norms through torch's own fused kernels. The legend is that of op.py."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def rms_norm(x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    sum_TM = x_TM if residual_TM is None else x_TM + residual_TM
    if weight_M.dtype != sum_TM.dtype:  # a float32 weight; torch's kernel takes one dtype only
        return F.rms_norm(sum_TM.float(), weight_M.shape, weight_M.float(), eps).to(sum_TM.dtype), sum_TM
    return F.rms_norm(sum_TM, weight_M.shape, weight_M, eps), sum_TM


def layer_norm(
    x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, bias_M: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    sum_TM = x_TM if residual_TM is None else x_TM + residual_TM
    return F.layer_norm(sum_TM, weight_M.shape, weight_M, bias_M, eps), sum_TM
