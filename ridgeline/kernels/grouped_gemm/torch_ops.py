"""Experts' products in plain torch, differentiable: a loop over the experts that have tokens. It reads their counts
back to the host, so it cannot be captured.

Legend: see op.py
    N  pairs of one expert
    C  pairs that are computed
    O  outputs of an expert's matrix
    I  inputs of an expert's matrix
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.activation.torch_ops import gated_activation
from ridgeline.kernels.route.op import Routes

Linear = Callable[[int, Tensor, Tensor | None], Tensor]  # (expert, rows, bias) → the expert's linear map of the rows


def grouped_gate_up(x_TM: Tensor, weight_EGM: Tensor, bias_EG: Tensor | None, routes: Routes, gate: str) -> Tensor:
    """Compute what the reference does, with products in the dtype of the weights."""
    return gate_up(_linear(weight_EGM), x_TM, bias_EG, routes, gate)


def grouped_down(
    h_PF: Tensor, weight_EMF: Tensor, bias_EM: Tensor | None, routes: Routes, add_TM: Tensor | None
) -> Tensor:
    """Compute what the reference does, with products in the dtype of the weights."""
    return down(_linear(weight_EMF), weight_EMF.shape[1], h_PF, bias_EM, routes, add_TM)


def gate_up(linear: Linear, x_TM: Tensor, bias_EO: Tensor | None, routes: Routes, gate: str) -> Tensor:
    """Compute the op `grouped_gate_up` with any experts' linear maps. Rows of pairs that nobody computes are left out,
    so the result may be shorter."""
    counts = _counts(routes)
    x_CM = x_TM.index_select(0, routes.token_P[: sum(counts)])
    return gated_activation(_each(linear, x_CM, bias_EO, counts), gate) if len(x_CM) else x_CM


def down(
    linear: Linear, outputs: int, h_PF: Tensor, bias_EM: Tensor | None, routes: Routes, add_TM: Tensor | None
) -> Tensor:
    """Compute the op `grouped_down` with any experts' linear maps to `outputs`."""
    counts = _counts(routes)
    computed, (tokens, used) = sum(counts), routes.expert_TK.shape
    y_CM = _each(linear, h_PF[:computed], bias_EM, counts) if computed else h_PF.new_zeros(0, outputs)
    weight_TK = routes.weight_TK
    if computed < tokens * used:  # some tokens go nowhere
        y_CM = torch.cat([y_CM, y_CM.new_zeros(tokens * used - computed, outputs)])
        weight_TK = weight_TK.masked_fill(routes.expert_TK >= len(counts), 0)
    y_TKM = y_CM.index_select(0, routes.place_TK.flatten()).view(tokens, used, outputs)
    # In the order of a token's choice, so that the sum does not depend on the tokens beside it
    y_TM = (weight_TK[:, :, None] * y_TKM).sum(1)
    return (y_TM if add_TM is None else y_TM + add_TM).to(h_PF.dtype)


def _linear(weight_EOI: Tensor) -> Linear:
    # One view of every expert, whose gradient is made in one piece
    weights = weight_EOI.unbind()
    return lambda expert, rows_NI, bias_O: F.linear(rows_NI, weights[expert], bias_O)


def _each(linear: Linear, x_CI: Tensor, bias_EO: Tensor | None, counts: list[int]) -> Tensor:
    """Return each pair's linear map, by the expert that it belongs to: [C, O]."""
    parts = []
    for expert, rows_NI in enumerate(x_CI.split(counts)):
        if len(rows_NI):
            parts.append(linear(expert, rows_NI, None if bias_EO is None else bias_EO[expert]))
    return torch.cat(parts)


def _counts(routes: Routes) -> list[int]:
    start = routes.start_E1.tolist()
    return [end - first for first, end in zip(start, start[1:], strict=False)]
