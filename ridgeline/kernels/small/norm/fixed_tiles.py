"""Norms on a CPU that give a token the same bits, however many stand beside it. The legend is that of op.py."""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.base.fixed_tiles import in_tiles
from ridgeline.kernels.small.norm import torch_ops


def rms_norm(x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y_TM, s_TM = in_tiles(lambda x, residual: torch_ops.rms_norm(x, residual, weight_M, eps), x_TM, residual_TM)
    return y_TM, s_TM


def layer_norm(
    x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, bias_M: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    y_TM, s_TM = in_tiles(
        lambda x, residual: torch_ops.layer_norm(x, residual, weight_M, bias_M, eps), x_TM, residual_TM
    )
    return y_TM, s_TM
