"""The gated norm through torch's own fused kernel. The legend is that of op.py."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.small.gated_norm.op import gate_of


def gated_norm(
    x_TM: Tensor, z_TM: Tensor, weight_M: Tensor, eps: float, group: int, norm_before_gate: bool, gate: str = "silu"
) -> Tensor:
    gate_TM = gate_of(gate)(z_TM.float())
    s_TM = x_TM.float() if norm_before_gate else x_TM.float() * gate_TM
    y_TM = F.rms_norm(s_TM.unflatten(-1, (-1, group)), (group,), None, eps).flatten(-2) * weight_M.float()
    return (y_TM * gate_TM if norm_before_gate else y_TM).to(x_TM.dtype)
