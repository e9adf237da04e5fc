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

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.op import Implementation, Op, on_gpu
from ridgeline.kernels.turns import Turns, turns_of

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
    v, decay_TG = v_TGV.double(), log_decay(a_TG.double(), log_rate_G.double(), dt_bias_G.double()).exp()
    beta_TG = b_TG.double().sigmoid()
    o_TGV = torch.zeros_like(v_TGV, memory_format=torch.contiguous_format)
    for row in turns.rows():
        state = torch.zeros_like(states_NGKV[0]) if row.fresh else states_NGKV[row.reads]
        state = state.double()
        for token in range(row.start, row.end):
            state = state * decay_TG[token, :, None, None]
            known = torch.einsum("gkv,gk->gv", state, k_TGK[token])
            moved = beta_TG[token, :, None] * (v[token] - known)
            state = state + k_TGK[token, :, :, None] * moved[:, None]
            o_TGV[token] = (torch.einsum("gkv,gk->gv", state, q_TGK[token]) * scale).to(o_TGV.dtype)
            if token + 1 - row.start == row.mark:
                states_NGKV[row.marked] = state.to(states_NGKV.dtype)
        states_NGKV[row.writes] = state.to(states_NGKV.dtype)
    return o_TGV


def unit(x: Tensor) -> Tensor:
    """Return vectors of length one, or nearly so if they are tiny."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def log_decay(a_TG: Tensor, log_rate_G: Tensor, dt_bias_G: Tensor) -> Tensor:
    """Return the logarithm of what a token leaves of the state before it."""
    return -log_rate_G.exp() * F.softplus(a_TG + dt_bias_G)


@dataclass(frozen=True)
class Case:
    """A case for tests and benchmarks.

    rows: the tokens of each row.
    heads: query and key heads. value_heads: value heads.
    marks: the mark of each row; (): no row has one.
    fresh: the rows that begin with zeros.
    padding: tokens behind the last row's.
    alike: how much the keys of a row have in common: 0: nothing, 1: they are all the same.
    """

    rows: tuple[int, ...]
    heads: int = 2
    value_heads: int = 4
    key_width: int = 32
    value_width: int = 32
    marks: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    padding: int = 0
    alike: float = 0.0

    def inputs(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Turns, float]:
        """Queries, keys and values are views of one tensor, as a convolution leaves them."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        turns = turns_of(self.rows, device, self.marks, self.fresh, self.padding)
        keys, values = self.heads * self.key_width, self.value_heads * self.value_width
        x_TX = normal(turns.num_tokens, 2 * keys + values)
        x_TX[:, keys : 2 * keys].mul_((1 - self.alike**2) ** 0.5).add_(self.alike * normal(keys))
        x_TX[sum(self.rows) :] = torch.nan
        q, k, v = x_TX.to(dtype).split((keys, keys, values), dim=1)
        a_TG, b_TG = (normal(turns.num_tokens, self.value_heads).to(dtype) for _ in range(2))
        log_rate_G, dt_bias_G = normal(self.value_heads) - 1, normal(self.value_heads)
        states_NGKV = normal(3 * len(self.rows) + 2, self.value_heads, self.key_width, self.value_width)
        states_NGKV[torch.cat((turns.reads_R[turns.fresh_R], turns.reads_R.new_zeros(1)))] = torch.nan
        return (
            q.unflatten(1, (self.heads, -1)), k.unflatten(1, (self.heads, -1)), v.unflatten(1, (self.value_heads, -1)),
            a_TG, b_TG, log_rate_G, dt_bias_G, states_NGKV, turns, self.key_width**-0.5,
        )  # fmt: skip


CASES = (
    Case((1,)),
    Case((1, 1, 1), heads=1, value_heads=3, key_width=16, fresh=(1,)),
    Case((5, 1, 0, 130, 2), marks=(2, 1, 0, 64, 0), fresh=(0, 3), padding=3),
    Case((70, 3, 1, 65), heads=1, value_heads=1, marks=(70, 1, 0, 30), fresh=(1,), alike=0.9),
    Case((150,), heads=1, value_heads=2, key_width=64, value_width=16, alike=1.0),
)

GATED_DELTA = Op(
    "gated_delta",
    gated_delta,
    (
        Implementation("triton", "ridgeline.kernels.gated_delta.triton:gated_delta", on_gpu),
        Implementation("torch", "ridgeline.kernels.gated_delta.torch_ops:gated_delta"),
        Implementation("batch_invariant", "ridgeline.kernels.gated_delta.triton:gated_delta_in_order", on_gpu),
    ),
)
