"""Products of tokens with their own experts' matrices. No token is dropped, whatever the counts.

A mixture's feed-forward is two ops. The first gathers each expert's tokens, multiplies them with gate and up and
applies the gated activation. The second multiplies with down and adds up each token's experts in the order of its
choice or of their numbers, so that the sum does not depend on the tokens beside it.

Matrices are plain stacks, or in FP8 or codes (matrices.py).

Legend:
    T  tokens
    M  model width
    E  experts
    K  experts of a token
    P  pairs of a token and one of its experts, T · K, sorted by expert
    F  an expert's inner width
    G  2 F: the rows of gate, then those of up; without a gate F
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, has_byte_products, on_gpu
from ridgeline.kernels.base.routing import PRODUCTS, UNGATED
from ridgeline.kernels.gemm.experts.matrices import Matrices, product, shape_of
from ridgeline.kernels.gemm.route.op import Routes
from ridgeline.kernels.small.activation.op import activation, gated_activation


def grouped_gate_up(x_TM: Tensor, weight_EGM: Matrices, bias_EG: Tensor | None, routes: Routes, gate: str) -> Tensor:
    """Return act(gate(x)) * up(x) of every pair, by each pair's own expert: [P, F] in the dtype of `x_TM`. Rows of
    pairs with none of these experts are undefined.

    gate: the activation. Experts with one that is in UNGATED have no gate: their matrices are [F, M], and the result is
        act(up(x)); of PRODUCTS it is what the matrices give, of any number of rows.

    Activations beside FP8 weights are rounded as the weights' format says. An implementation may leave them as they
    are, or find finer scales than a static one, and may round dequantized weights to the dtype of `x_TM`.
    """
    pairs, apply = len(routes.token_P), activation if gate in UNGATED else gated_activation
    inner = shape_of(weight_EGM)[1] // (1 if gate in UNGATED else 2)
    y_PF = torch.zeros(pairs, inner, dtype=x_TM.dtype, device=x_TM.device)
    for expert, (first, end) in enumerate(_spans(routes)):
        if first < end:
            bias_G = None if bias_EG is None else bias_EG[expert]
            y_NG = product(x_TM[routes.token_P[first:end].long()], weight_EGM, expert, bias_G)
            y_PF[first:end] = (y_NG if gate == PRODUCTS else apply(y_NG, gate)).to(x_TM.dtype)
    return y_PF


def grouped_down(
    h_PF: Tensor, weight_EMF: Matrices, bias_EM: Tensor | None, routes: Routes, add_TM: Tensor | None
) -> Tensor:
    """Return, for every token, the sum over its experts of weight · (down(h) + bias), plus `add_TM` if there is one:
    [T, M] in the dtype of `h_PF`. Sums are in float32. Tokens that go nowhere get `add_TM` alone, or 0. Roundings are
    those of `grouped_gate_up`.

    add_TM: another part of the feed-forward's output (a shared expert's).
    """
    tokens, used = routes.expert_TK.shape
    experts, width, _ = shape_of(weight_EMF)
    y_PM = torch.zeros(tokens * used, width, device=h_PF.device)
    for expert, (first, end) in enumerate(_spans(routes)):
        if first < end:
            bias_M = None if bias_EM is None else bias_EM[expert]
            y_PM[first:end] = product(h_PF[first:end], weight_EMF, expert, bias_M)
    computed_TK = routes.expert_TK < experts
    weight_TK = torch.where(computed_TK, routes.weight_TK, 0)
    y_TKM = torch.where(computed_TK[:, :, None], y_PM[routes.place_TK.long()], 0)
    y_TM = (weight_TK[:, :, None] * y_TKM).sum(1)
    return (y_TM if add_TM is None else y_TM + add_TM.float()).to(h_PF.dtype)


def _spans(routes: Routes) -> list[tuple[int, int]]:
    start = routes.start_E1.tolist()
    return list(pairwise(start))


_HERE = "ridgeline.kernels.gemm.experts"
GROUPED_GATE_UP = Op(
    "grouped_gate_up",
    grouped_gate_up,
    (
        Implementation("triton", f"{_HERE}.triton:grouped_gate_up", on_gpu),
        Implementation("panels", f"{_HERE}.panels:grouped_gate_up", has_byte_products),
        Implementation("torch", f"{_HERE}.torch_ops:grouped_gate_up"),
        Implementation("batch_invariant", f"{_HERE}.batch_invariant:grouped_gate_up", on_gpu),
    ),
    matrix=True,
)
GROUPED_DOWN = Op(
    "grouped_down",
    grouped_down,
    (
        Implementation("triton", f"{_HERE}.triton:grouped_down", on_gpu),
        Implementation("panels", f"{_HERE}.panels:grouped_down", has_byte_products),
        Implementation("torch", f"{_HERE}.torch_ops:grouped_down"),
        Implementation("batch_invariant", f"{_HERE}.batch_invariant:grouped_down", on_gpu),
    ),
    matrix=True,
)
