"""Pointwise activations of the feed-forward.

kind: "silu" is x·σ(x), "gelu" is x·Φ(x), and "gelu_tanh" approximates that by tanh (Hendrycks and Gimpel, arXiv
1606.08415); "quick_gelu" does so by x·σ(1.702 x). "relu" is max(x, 0), and "relu2" its square. Others are gated only.
"swiglu_clamped" is, with gate clamped to at most 7 and up to ±7, gate · σ(1.702 gate) · (up + 1), as in gpt-oss.
"silu_clamped_7" clamps gate · σ(gate) to at most 7, and up to ±7, and "silu_clamped_16" is the same with 16, as in
Step-3.5.

Legend:
    T  tokens
    F  intermediate width
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, on_cpu, on_gpu

LIMIT, SHARPNESS = 7.0, 1.702  # of swiglu_clamped; the second of quick_gelu too
SILU_LIMITS = {"silu_clamped_7": 7.0, "silu_clamped_16": 16.0}


def activation(x_TF: Tensor, kind: str) -> Tensor:
    """Apply `kind` to every element, in float32: [T, F] in the dtype of `x_TF`."""
    return _activate(x_TF.float(), kind).to(x_TF.dtype)


def gated_activation(x_T2F: Tensor, kind: str) -> Tensor:
    """Return activation(first half) * second half, computed in float32: [T, F] in the dtype of `x_T2F`."""
    gate_TF, up_TF = x_T2F.float().chunk(2, dim=-1)
    if kind == "swiglu_clamped":
        gate_TF = gate_TF.clamp(max=LIMIT)
        y_TF = gate_TF * torch.sigmoid(SHARPNESS * gate_TF) * (up_TF.clamp(-LIMIT, LIMIT) + 1)
        return y_TF.to(x_T2F.dtype)
    if (limit := SILU_LIMITS.get(kind)) is not None:
        y_TF = _activate(gate_TF, "silu").clamp(max=limit) * up_TF.clamp(-limit, limit)
        return y_TF.to(x_T2F.dtype)
    return (_activate(gate_TF, kind) * up_TF).to(x_T2F.dtype)


def _activate(x: Tensor, kind: str) -> Tensor:
    if kind == "silu":
        return x * torch.sigmoid(x)
    if kind == "gelu":
        return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if kind == "quick_gelu":
        return x * torch.sigmoid(SHARPNESS * x)
    if kind == "relu":
        return x.clamp(min=0)
    if kind == "relu2":
        return x.clamp(min=0).square()
    raise ValueError(f"unknown activation {kind!r}")


ACTIVATION = Op(
    "activation",
    activation,
    (
        Implementation("triton", "ridgeline.kernels.small.activation.triton:activation", on_gpu),
        Implementation("torch", "ridgeline.kernels.small.activation.torch_ops:activation"),
        Implementation("fixed_tiles", "ridgeline.kernels.small.activation.fixed_tiles:activation", on_cpu),
    ),
)
GATED_ACTIVATION = Op(
    "gated_activation",
    gated_activation,
    (
        Implementation("triton", "ridgeline.kernels.small.activation.triton:gated_activation", on_gpu),
        Implementation("torch", "ridgeline.kernels.small.activation.torch_ops:gated_activation"),
        Implementation(
            "triton_training", "ridgeline.kernels.small.activation.triton_training:gated_activation", on_gpu
        ),
        Implementation("fixed_tiles", "ridgeline.kernels.small.activation.fixed_tiles:gated_activation", on_cpu),
    ),
)
