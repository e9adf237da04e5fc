"""Experts' products in plain torch, differentiable: a loop over the experts that have tokens. It reads their counts
back to the host, so it cannot be captured.

Legend: see op.py
    N  pairs of one expert
    C  pairs that are computed
    O  outputs of an expert's matrix
    I  inputs of an expert's matrix
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.base.routing import PRODUCTS, UNGATED
from ridgeline.kernels.gemm.experts.matrices import Matrices, Quantized, dequantized, shape_of
from ridgeline.kernels.gemm.fp8.op import Fp8, rounded
from ridgeline.kernels.gemm.route.op import Routes
from ridgeline.kernels.small.activation.torch_ops import activation, gated_activation

Span = tuple[int, int, int]  # (expert, its first pair, the one behind its last)
Linear = Callable[[int, Tensor, Tensor | None], Tensor]  # (expert, rows, bias) → the expert's linear map of the rows


def grouped_gate_up(x_TM: Tensor, weight_EGM: Matrices, bias_EG: Tensor | None, routes: Routes, gate: str) -> Tensor:
    """Compute what the reference does, with products in the dtype of the weights, or of x if these are quantized."""
    return gate_up(_linear(weight_EGM), x_TM, bias_EG, routes, gate)


def grouped_down(
    h_PF: Tensor, weight_EMF: Matrices, bias_EM: Tensor | None, routes: Routes, add_TM: Tensor | None
) -> Tensor:
    """Compute what the reference does, with products in the dtype of the weights, or of h if these are quantized."""
    return down(_linear(weight_EMF), shape_of(weight_EMF)[1], h_PF, bias_EM, routes, add_TM)


def gate_up(linear: Linear, x_TM: Tensor, bias_EO: Tensor | None, routes: Routes, gate: str) -> Tensor:
    """Compute the op `grouped_gate_up` with any experts' linear maps. Rows of pairs with none of these experts are left
    out, so the result may be shorter."""
    computed, spans = _spans(routes)
    x_CM = x_TM.index_select(0, routes.token_P[:computed])
    return activated(_each(linear, x_CM, bias_EO, spans), gate) if computed else x_CM


def activated(y_PG: Tensor, gate: str) -> Tensor:
    """Return act(gate) * up of products with both, or act(up) of experts without a gate: [P, F]."""
    if gate == PRODUCTS:
        return y_PG
    return activation(y_PG, gate) if gate in UNGATED else gated_activation(y_PG, gate)


def down(
    linear: Linear, outputs: int, h_PF: Tensor, bias_EM: Tensor | None, routes: Routes, add_TM: Tensor | None
) -> Tensor:
    """Compute the op `grouped_down` with any experts' linear maps to `outputs`."""
    computed, spans = _spans(routes)
    tokens, used = routes.expert_TK.shape
    y_CM = _each(linear, h_PF, bias_EM, spans) if computed else h_PF.new_zeros(0, outputs)
    weight_TK = routes.weight_TK
    if computed < tokens * used:  # some tokens go nowhere
        y_CM = torch.cat([y_CM, y_CM.new_zeros(tokens * used - computed, outputs)])
        weight_TK = weight_TK.masked_fill(routes.expert_TK == len(routes.start_E1) - 1, 0)
    y_TKM = y_CM.index_select(0, routes.place_TK.flatten()).view(tokens, used, outputs)
    # In the order of a token's choice, so that the sum does not depend on the tokens beside it
    y_TM = (weight_TK[:, :, None] * y_TKM).sum(1)
    return (y_TM if add_TM is None else y_TM + add_TM).to(h_PF.dtype)


def _linear(weight_EOI: Matrices) -> Linear:
    if not isinstance(weight_EOI, Tensor):
        return partial(_dequantizing, weight_EOI)
    weights = weight_EOI.unbind()  # the gradient of all views is made in one piece
    return lambda expert, rows_NI, bias_O: F.linear(rows_NI, weights[expert], bias_O)


def _dequantizing(weight: Quantized, expert: int, rows_NI: Tensor, bias_O: Tensor | None) -> Tensor:
    if isinstance(weight, Fp8):
        x_scale = None if weight.x_scale is None else weight.x_scale[expert]
        rows_NI = rounded(rows_NI, weight.format, x_scale).to(rows_NI.dtype)
    return F.linear(rows_NI, dequantized(weight, expert).to(rows_NI.dtype), bias_O)


def _each(linear: Linear, x_CI: Tensor, bias_EO: Tensor | None, spans: Sequence[Span]) -> Tensor:
    """Return each pair's linear map, by the expert that it belongs to: [C, O]."""
    parts = [linear(e, x_CI[first:end], None if bias_EO is None else bias_EO[e]) for e, first, end in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _spans(routes: Routes) -> tuple[int, list[Span]]:
    """Return (the number of pairs that are computed, the spans of the experts that have some)."""
    start = routes.start_E1.tolist()
    return start[-1], [(expert, *span) for expert, span in enumerate(pairwise(start)) if span[0] < span[1]]
