"""Activations through torch's own kernels. The legend is that of op.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.small.activation.op import LIMIT, SHARPNESS, SILU_LIMITS

_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * (SHARPNESS * x).sigmoid(),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activation(x_TF: Tensor, kind: str) -> Tensor:
    return _KINDS[kind](x_TF)


def gated_activation(x_T2F: Tensor, kind: str) -> Tensor:
    gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
    if kind == "swiglu_clamped":
        gate_TF = gate_TF.clamp(max=LIMIT)
        return gate_TF * (SHARPNESS * gate_TF).sigmoid() * (up_TF.clamp(-LIMIT, LIMIT) + 1)
    if (limit := SILU_LIMITS.get(kind)) is not None:
        return F.silu(gate_TF).clamp(max=limit) * up_TF.clamp(-limit, limit)
    return _KINDS[kind](gate_TF) * up_TF
