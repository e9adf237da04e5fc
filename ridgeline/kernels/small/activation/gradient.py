"""The gradients of gated activations, as an op of its own, which graphs of compilers call. The legend is op.py's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, on_gpu
from ridgeline.kernels.small.activation.op import LIMIT, SHARPNESS, SILU_LIMITS, activation


def gated_activation_gradient(x_T2F: Tensor, dy_TF: Tensor, kind: str) -> Tensor:
    """Return the gradients of both halves of x: [T, 2F] in its dtype. dy_TF: that of the result. A number that a kind
    has clamped has none."""
    gate_TF, up_TF = x_T2F.float().chunk(2, dim=-1)
    dy_TF = dy_TF.float()
    if kind == "swiglu_clamped":
        g_TF, u_TF = gate_TF.clamp(max=LIMIT), up_TF.clamp(-LIMIT, LIMIT)
        y_TF, slope_TF = activation(g_TF, "quick_gelu"), _slope(g_TF, "quick_gelu")
        dgate_TF = dy_TF * (u_TF + 1) * slope_TF * (gate_TF <= LIMIT)
        dup_TF = dy_TF * y_TF * (up_TF.abs() <= LIMIT)
    elif (limit := SILU_LIMITS.get(kind)) is not None:
        y_TF = activation(gate_TF, "silu")
        dgate_TF = dy_TF * up_TF.clamp(-limit, limit) * _slope(gate_TF, "silu") * (y_TF <= limit)
        dup_TF = dy_TF * y_TF.clamp(max=limit) * (up_TF.abs() <= limit)
    else:
        dgate_TF, dup_TF = dy_TF * up_TF * _slope(gate_TF, kind), dy_TF * activation(gate_TF, kind)
    return torch.cat((dgate_TF, dup_TF), -1).to(x_T2F.dtype)


def _slope(x: Tensor, kind: str) -> Tensor:
    """Return the derivative of `activation`."""
    if kind in ("silu", "quick_gelu"):
        sharpness = SHARPNESS if kind == "quick_gelu" else 1.0
        s = torch.sigmoid(sharpness * x)
        return s + sharpness * x * s * (1 - s)
    if kind == "gelu":
        return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    if kind == "gelu_tanh":
        factor = math.sqrt(2 / math.pi)
        t = torch.tanh(factor * (x + 0.044715 * x**3))
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * factor * (1 + 3 * 0.044715 * x * x)
    if kind == "relu":
        return (x > 0).float()
    if kind == "relu2":
        return 2 * x.clamp(min=0)
    raise ValueError(f"unknown activation {kind!r}")


GATED_ACTIVATION_GRADIENT = Op(
    "gated_activation_gradient",
    gated_activation_gradient,
    (
        Implementation(
            "triton_training", "ridgeline.kernels.small.activation.triton_training:gated_activation_gradient", on_gpu
        ),
    ),
)
