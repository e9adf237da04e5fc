"""Experts' products in plain torch, differentiable: a loop over the experts that have tokens. It reads their counts
back to the host, so it cannot be captured.

Legend: see op.py
    N  pairs of one expert
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ridgeline.kernels.activation.torch_ops import gated_activation
from ridgeline.kernels.route.op import Routes


def grouped_gate_up(x_TM: Tensor, weight_EGM: Tensor, bias_EG: Tensor | None, routes: Routes, gate: str) -> Tensor:
    """Compute what the reference does, with products in the dtype of the weights."""
    parts = []
    for expert, (first, end) in touched(routes):
        rows_NM = x_TM[routes.token_P[first:end].long()]
        bias_G = None if bias_EG is None else bias_EG[expert]
        parts.append(gated_activation(torch.nn.functional.linear(rows_NM, weight_EGM[expert], bias_G), gate))
    rest = len(routes.token_P) - sum(map(len, parts))
    return torch.cat([*parts, x_TM.new_zeros(rest, weight_EGM.shape[1] // 2)])


def grouped_down(
    h_PF: Tensor, weight_EMF: Tensor, bias_EM: Tensor | None, routes: Routes, add_TM: Tensor | None
) -> Tensor:
    """Compute what the reference does, with products in the dtype of the weights."""
    parts = []
    for expert, (first, end) in touched(routes):
        bias_M = None if bias_EM is None else bias_EM[expert]
        parts.append(torch.nn.functional.linear(h_PF[first:end], weight_EMF[expert], bias_M))
    rest = len(routes.token_P) - sum(map(len, parts))
    y_PM = torch.cat([*parts, h_PF.new_zeros(rest, weight_EMF.shape[1])])
    return combined(y_PM, routes, add_TM, len(weight_EMF))


def touched(routes: Routes) -> list[tuple[int, tuple[int, int]]]:
    """Return (expert, (its first pair, the one behind its last)) of the experts that have pairs."""
    start = routes.start_E1.tolist()
    return [(expert, span) for expert, span in enumerate(pairwise(start)) if span[1] > span[0]]


def combined(y_PM: Tensor, routes: Routes, add_TM: Tensor | None, experts: int) -> Tensor:
    """Return each token's weighted sum over its experts' outputs, in a fixed order, plus `add_TM`."""
    weight_TK = routes.weight_TK.masked_fill(routes.expert_TK >= experts, 0)
    y_TM = (weight_TK[:, :, None] * y_PM[routes.place_TK.long()]).sum(1)
    return (y_TM if add_TM is None else y_TM + add_TM).to(y_PM.dtype)
