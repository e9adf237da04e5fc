"""RMS norm with a gate, as recurrent mixers have it in front of their last product.

Legend:
    T  tokens (or any leading dimensions)
    M  width of a token's vector
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.base.op import Implementation, Op, on_gpu

GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def gated_norm(
    x_TM: Tensor, z_TM: Tensor, weight_M: Tensor, eps: float, group: int, norm_before_gate: bool, gate: str = "silu"
) -> Tensor:
    """Return rms(x) · weight · gate(z) if the norm comes before the gate, and rms(x · gate(z)) · weight otherwise. The
    result is dense and has x's shape and dtype.

    x_TM, z_TM: [..., M]; a vector's numbers must lie side by side.
    weight_M: one weight for each of M, in any dtype.
    group: so many numbers side by side have a norm of their own. It divides M.
    gate: "silu" or "sigmoid".
    """
    gate_TM = gate_of(gate)(z_TM.float())
    s_TM = x_TM.float() if norm_before_gate else x_TM.float() * gate_TM
    groups = s_TM.unflatten(-1, (-1, group))
    y_TM = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight_M.float()
    return (y_TM * gate_TM if norm_before_gate else y_TM).to(x_TM.dtype)


def gate_of(name: str) -> Callable[[Tensor], Tensor]:
    """Return the function of a gate's name. Raises ValueError for names that do not exist."""
    if name not in GATES:
        raise ValueError(f"there is no gate {name!r}; known: {', '.join(GATES)}.")
    return GATES[name]


GATED_NORM = Op(
    "gated_norm",
    gated_norm,
    (
        Implementation("triton", "ridgeline.kernels.small.gated_norm.triton:gated_norm", on_gpu),
        Implementation("torch", "ridgeline.kernels.small.gated_norm.torch_ops:gated_norm"),
    ),
)
