"""The gated delta rule, over rows of unlike lengths.

A state maps keys to values. Each token lets the state decay, and then moves what the state says about its key towards
its value.

Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464.

Legend:
    G  value heads
    H  query and key heads; value head g uses head g // (G / H)
    K  width of a query or key
    N  block ids
    R  rows
    T  tokens of the step
    V  width of a value
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.op import Implementation, Op, on_gpu
from ridgeline.kernels.recurrence import decaying, recurrence
from ridgeline.kernels.turns import Turns

NORM_EPS = 1e-6  # is added to the sum of a query's or key's squares


def gated_delta(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TGV: Tensor,
    a_TG: Tensor,
    b_TG: Tensor,
    log_rate_G: Tensor,
    dt_bias_G: Tensor,
    states_NGKV: Tensor,
    turns: Turns,
    scale: float,
) -> Tensor:
    """Return o_TGV, dense and of v's dtype, and replace the rows' states.

    With q and k of length one, decay = exp(-exp(log_rate) · softplus(a + dt_bias)) and β = sigmoid(b), each token does

        S ← decay · S;    S ← S + k ⊗ β (v - Sᵀ k);    o = Sᵀ q · scale

    q_THK, k_THK, v_TGV: the numbers of a head, and the heads of a token, must lie side by side.
    states_NGKV: float32. It may be strided by block id.
    """
    share = v_TGV.shape[1] // k_THK.shape[1]
    q_TGK, k_TGK = (unit(x.double()).repeat_interleave(share, dim=1) for x in (q_THK, k_THK))
    left_TG = log_decay(a_TG.double(), log_rate_G.double(), dt_bias_G.double()).exp()
    rule = decaying(q_TGK, k_TGK, v_TGV.double(), left_TG[..., None], scale, b_TG.double().sigmoid())
    return recurrence(rule, states_NGKV, turns, v_TGV)


def unit(x: Tensor) -> Tensor:
    """Return vectors of length one, or nearly so if they are tiny."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def log_decay(a_TG: Tensor, log_rate_G: Tensor, dt_bias_G: Tensor) -> Tensor:
    """Return the logarithm of what a token leaves of the state before it."""
    return -log_rate_G.exp() * F.softplus(a_TG + dt_bias_G)


GATED_DELTA = Op(
    "gated_delta",
    gated_delta,
    (
        Implementation("triton", "ridgeline.kernels.gated_delta.triton:gated_delta", on_gpu),
        Implementation("torch", "ridgeline.kernels.gated_delta.torch_ops:gated_delta"),
        Implementation("batch_invariant", "ridgeline.kernels.gated_delta.triton:gated_delta_in_order", on_gpu),
    ),
    matrix=True,
)
