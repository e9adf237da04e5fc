"""Norms, activations and rotations on a CPU that give a token the same bits, however many stand beside it."""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.base.fixed_tiles import in_tiles
from ridgeline.kernels.small.activation import torch_ops as activations
from ridgeline.kernels.small.norm import torch_ops as norms
from ridgeline.kernels.small.rotary.op import Projected
from ridgeline.kernels.small.rotary.torch_ops import rope_kv_with


def rms_norm(x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y_TM, s_TM = in_tiles(lambda x, residual: norms.rms_norm(x, residual, weight_M, eps), x_TM, residual_TM)
    return y_TM, s_TM


def layer_norm(
    x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, bias_M: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    y_TM, s_TM = in_tiles(lambda x, residual: norms.layer_norm(x, residual, weight_M, bias_M, eps), x_TM, residual_TM)
    return y_TM, s_TM


def activation(x_TF: Tensor, kind: str) -> Tensor:
    return in_tiles(lambda x: [activations.activation(x, kind)], x_TF)[0]


def gated_activation(x_T2F: Tensor, kind: str) -> Tensor:
    return in_tiles(lambda x: [activations.gated_activation(x, kind)], x_T2F)[0]


def rope_kv(projected: Projected) -> Tensor:
    return rope_kv_with(rms_norm, projected)
