"""Delta rules with a decay, over rows of unlike lengths.

A state maps keys to values. Each token lets the state decay, and then moves what the state says about its key towards
its value. With the gated delta rule a head decays by one number; with Kimi's delta attention every channel of a key
decays by itself.

Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464; Kimi Team, "Kimi Linear", arXiv 2510.26692.

Legend:
    G  value heads
    H  query and key heads; value head g uses head g // (G / H)
    J  numbers of a token's decay: K, or 1
    K  width of a query or key
    N  block ids
    R  rows
    T  tokens of the step
    V  width of a value
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.base.op import Implementation, Op, on_gpu
from ridgeline.kernels.scans.metadata import Inputs, ScanMetadata
from ridgeline.kernels.scans.recurrence import decaying, recurrence

NORM_EPS = 1e-6  # is added to the sum of a query's or key's squares


@dataclass(frozen=True)
class DeltaInputs(Inputs):
    """q_THK, k_THK, v_TGV, and `a` of channels: the numbers of a head, and the heads of a token, must lie side by side.

    a, dt_bias: what decays are made of: [T, G] and [G] for the gated delta rule, [T, H, K] and [H, K] for delta
        attention, which has as many query heads as value heads.
    b_TG: what the strengths β are made of.
    """

    q_THK: Tensor
    k_THK: Tensor
    v_TGV: Tensor
    a: Tensor
    b_TG: Tensor
    log_rate_G: Tensor
    dt_bias: Tensor
    scale: float
    of_tokens = ("q_THK", "k_THK", "v_TGV", "a", "b_TG")

    def log_decay_TGJ(self, dtype: torch.dtype) -> Tensor:
        """Return the logarithms of what tokens leave of the state before them."""
        a, log_rate_G, dt_bias = (x.to(dtype) for x in (self.a, self.log_rate_G, self.dt_bias))
        if a.dim() == 3:
            return -log_rate_G[:, None].exp() * F.softplus(a + dt_bias)
        return (-log_rate_G.exp() * F.softplus(a + dt_bias))[..., None]


def delta_rule(given: DeltaInputs, states_NGKV: Tensor, metadata: ScanMetadata) -> Tensor:
    """Return o_TGV, dense and of v's dtype, and replace the rows' states.

    With q and k of length one, decay = exp(-exp(log_rate) · softplus(a + dt_bias)) and β = sigmoid(b), each token does

        S ← decay · S;    S ← S + k ⊗ β (v - Sᵀ k);    o = Sᵀ q · scale

    states_NGKV: float32. It may be strided by block id.
    """
    share = given.v_TGV.shape[1] // given.k_THK.shape[1]
    q_TGK, k_TGK = (unit(x.double()).repeat_interleave(share, dim=1) for x in (given.q_THK, given.k_THK))
    left_TGJ, beta_TG = given.log_decay_TGJ(torch.float64).exp(), given.b_TG.double().sigmoid()
    rule = decaying(q_TGK, k_TGK, given.v_TGV.double(), left_TGJ, given.scale, beta_TG)
    return recurrence(rule, states_NGKV, metadata, given.v_TGV)


def unit(x: Tensor) -> Tensor:
    """Return vectors of length one, or nearly so if they are tiny."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


GATED_DELTA = Op(
    "gated_delta",
    delta_rule,
    (
        Implementation("triton", "ridgeline.kernels.scans.gated_delta.triton:gated_delta", on_gpu),
        Implementation("torch", "ridgeline.kernels.scans.gated_delta.torch_ops:gated_delta"),
        Implementation("batch_invariant", "ridgeline.kernels.scans.gated_delta.triton:gated_delta_in_order", on_gpu),
    ),
    matrix=True,
)

DELTA_ATTENTION = Op(
    "delta_attention",
    delta_rule,
    (
        Implementation("triton", "ridgeline.kernels.scans.gated_delta.triton:delta_attention", on_gpu),
        Implementation("torch", "ridgeline.kernels.scans.gated_delta.torch_ops:delta_attention"),
        Implementation(
            "batch_invariant", "ridgeline.kernels.scans.gated_delta.triton:delta_attention_in_order", on_gpu
        ),
    ),
    matrix=True,
)
