"""The delta rule with a decay of each key channel, over rows of unlike lengths: Kimi's delta attention.

A state maps keys to values. Each token lets every channel of the state decay by itself, and then moves what the state
says about its key towards its value.

Kimi Team, "Kimi Linear", arXiv 2510.26692.

Legend:
    H  heads
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

from ridgeline.kernels.gated_delta.op import log_decay, unit
from ridgeline.kernels.op import Implementation, Op, on_gpu
from ridgeline.kernels.turns import Turns, turns_of


def delta_attention(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    a_THK: Tensor,
    b_TH: Tensor,
    log_rate_H: Tensor,
    dt_bias_HK: Tensor,
    states_NHKV: Tensor,
    turns: Turns,
    scale: float,
) -> Tensor:
    """Return o_THV, dense and of v's dtype, and replace the rows' states.

    With q and k of length one, decay = exp(-exp(log_rate) · softplus(a + dt_bias)) and β = sigmoid(b), each token does

        S ← decay · S;    S ← S + k ⊗ β (v - Sᵀ k);    o = Sᵀ q · scale

    q_THK, k_THK, v_THV, a_THK: the numbers of a head, and the heads of a token, must lie side by side.
    states_NHKV: float32. It may be strided by block id.
    """
    q, k, v = unit(q_THK.double()), unit(k_THK.double()), v_THV.double()
    left_THK = log_decay(a_THK.double(), log_rate_H.double()[:, None], dt_bias_HK.double()).exp()
    beta_TH = b_TH.double().sigmoid()
    o_THV = torch.zeros_like(v_THV, memory_format=torch.contiguous_format)
    for row in turns.rows():
        state = torch.zeros_like(states_NHKV[0]) if row.fresh else states_NHKV[row.reads]
        state = state.double()
        for token in range(row.start, row.end):
            state = state * left_THK[token, :, :, None]
            known = torch.einsum("hkv,hk->hv", state, k[token])
            state = state + k[token, :, :, None] * (beta_TH[token, :, None] * (v[token] - known))[:, None]
            o_THV[token] = (torch.einsum("hkv,hk->hv", state, q[token]) * scale).to(o_THV.dtype)
            if token + 1 - row.start == row.mark:
                states_NHKV[row.marked] = state.to(states_NHKV.dtype)
        states_NHKV[row.writes] = state.to(states_NHKV.dtype)
    return o_THV


@dataclass(frozen=True)
class Case:
    """A case for tests and benchmarks.

    rows: the tokens of each row.
    marks: the mark of each row; (): no row has one.
    fresh: the rows that begin with zeros.
    padding: tokens behind the last row's.
    alike: how much the keys of a row have in common: 0: nothing, 1: they are all the same.
    slow: this is added to the logarithms of the rates.
    """

    rows: tuple[int, ...]
    heads: int = 2
    key_width: int = 32
    value_width: int = 32
    marks: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    padding: int = 0
    alike: float = 0.0
    slow: float = -1.0

    def inputs(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Turns, float]:
        """Queries, keys and values are views of one tensor, as a convolution leaves them."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        turns = turns_of(self.rows, device, self.marks, self.fresh, self.padding)
        heads, keys, values = self.heads, self.heads * self.key_width, self.heads * self.value_width
        x_TX = normal(turns.num_tokens, 2 * keys + values)
        x_TX[:, keys : 2 * keys].mul_((1 - self.alike**2) ** 0.5).add_(self.alike * normal(keys))
        x_TX[sum(self.rows) :] = torch.nan
        q, k, v = (x.unflatten(1, (heads, -1)) for x in x_TX.to(dtype).split((keys, keys, values), dim=1))
        a_THK, b_TH = normal(turns.num_tokens, heads, self.key_width).to(dtype), normal(turns.num_tokens, heads)
        log_rate_H, dt_bias_HK = normal(heads) + self.slow, normal(heads, self.key_width)
        states_NHKV = normal(3 * len(self.rows) + 2, heads, self.key_width, self.value_width)
        states_NHKV[torch.cat((turns.reads_R[turns.fresh_R], turns.reads_R.new_zeros(1)))] = torch.nan
        return (
            q, k, v, a_THK, b_TH.to(dtype), log_rate_H, dt_bias_HK, states_NHKV, turns, self.key_width**-0.5,
        )  # fmt: skip


CASES = (
    Case((1,)),
    Case((1, 1, 1), heads=1, key_width=16, fresh=(1,)),
    Case((5, 1, 0, 130, 2), marks=(2, 1, 0, 64, 0), fresh=(0, 3), padding=3),
    Case((70, 3, 1, 65), heads=1, marks=(70, 1, 0, 30), fresh=(1,), alike=0.9),
    Case((90,), heads=1, key_width=64, value_width=16, alike=1.0, slow=2.0),
)

DELTA_ATTENTION = Op(
    "delta_attention",
    delta_attention,
    (
        Implementation("triton", "ridgeline.kernels.delta_attention.triton:delta_attention", on_gpu),
        Implementation("torch", "ridgeline.kernels.delta_attention.torch_ops:delta_attention"),
        Implementation("batch_invariant", "ridgeline.kernels.delta_attention.triton:delta_attention_in_order", on_gpu),
    ),
)
