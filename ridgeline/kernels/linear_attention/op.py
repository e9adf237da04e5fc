"""Linear attention whose state decays, over rows of unlike lengths.

A state maps keys to values. Each token lets the state decay, and then adds its own key and value. The decay is a number
of each token and key channel (gated linear attention), of each token and head, or of each head (retention).

Yang, Wang, Shen, Panda and Kim, "Gated Linear Attention Transformers", arXiv 2312.06635; Sun et al., "Retentive
Network", arXiv 2307.08621.

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
from typing import Literal

import torch
from torch import Tensor

from ridgeline.kernels.op import Implementation, Op, on_gpu
from ridgeline.kernels.turns import Turns, turns_of


def linear_attention(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, decay: Tensor, states_NHKV: Tensor, turns: Turns, scale: float
) -> Tensor:
    """Return o_THV, dense and of v's dtype, and replace the rows' states. Each token does

        S ← exp(decay) · S + k ⊗ v;    o = Sᵀ q · scale

    q_THK, k_THK, v_THV: the numbers of a head, and the heads of a token, must lie side by side.
    decay: the logarithm of what is left of the state, finite and at most 0: [T, H, K], [T, H] or [H].
    states_NHKV: float32. It may be strided by block id.
    """
    q, k, v = q_THK.double(), k_THK.double(), v_THV.double()
    left_THK = by_channel(decay, k_THK).double().exp()
    o_THV = torch.zeros_like(v_THV, memory_format=torch.contiguous_format)
    for row in turns.rows():
        state = torch.zeros_like(states_NHKV[0]) if row.fresh else states_NHKV[row.reads]
        state = state.double()
        for token in range(row.start, row.end):
            state = left_THK[token, :, :, None] * state + k[token, :, :, None] * v[token, :, None]
            o_THV[token] = (torch.einsum("hkv,hk->hv", state, q[token]) * scale).to(o_THV.dtype)
            if token + 1 - row.start == row.mark:
                states_NHKV[row.marked] = state.to(states_NHKV.dtype)
        states_NHKV[row.writes] = state.to(states_NHKV.dtype)
    return o_THV


def by_channel(decay: Tensor, k_THK: Tensor) -> Tensor:
    """Return the decay of each token, head and channel, as a view."""
    if decay.dim() == 1:
        decay = decay.expand(len(k_THK), -1)
    return (decay if decay.dim() == 3 else decay[:, :, None]).expand_as(k_THK)


@dataclass(frozen=True)
class Case:
    """A case for tests and benchmarks.

    rows: the tokens of each row.
    decay: what has a decay of its own.
    marks: the mark of each row; (): no row has one.
    fresh: the rows that begin with zeros.
    padding: tokens behind the last row's.
    fast: the size of the decays.
    """

    rows: tuple[int, ...]
    heads: int = 2
    key_width: int = 32
    value_width: int = 32
    decay: Literal["channel", "token", "head"] = "channel"
    marks: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    padding: int = 0
    fast: float = 0.1

    def inputs(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Turns, float]:
        """Queries, keys and values are views of one tensor, as a projection leaves them."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        turns = turns_of(self.rows, device, self.marks, self.fresh, self.padding)
        keys, values = self.heads * self.key_width, self.heads * self.value_width
        x_TX = normal(turns.num_tokens, 2 * keys + values)
        x_TX[sum(self.rows) :] = torch.nan
        q, k, v = (x.unflatten(1, (self.heads, -1)) for x in x_TX.to(dtype).split((keys, keys, values), dim=1))
        shape = (turns.num_tokens, self.heads, self.key_width)
        decay = -self.fast * normal(*{"channel": shape, "token": shape[:2], "head": shape[1:2]}[self.decay]).exp()
        states_NHKV = normal(3 * len(self.rows) + 2, *shape[1:], self.value_width)
        states_NHKV[torch.cat((turns.reads_R[turns.fresh_R], turns.reads_R.new_zeros(1)))] = torch.nan
        return q, k, v, decay, states_NHKV, turns, self.key_width**-0.5


CASES = (
    Case((1,)),
    Case((1, 1, 1), heads=1, key_width=16, fresh=(1,), decay="head"),
    Case((5, 1, 0, 130, 2), marks=(2, 1, 0, 64, 0), fresh=(0, 3), padding=3),
    Case((70, 3, 1, 65), heads=1, decay="token", marks=(70, 1, 0, 30), fresh=(1,)),
    Case((40,), heads=3, key_width=24, value_width=16, decay="head", fast=0.02),
    Case((90,), heads=1, key_width=64, value_width=48, fast=3.0),
)

LINEAR_ATTENTION = Op(
    "linear_attention",
    linear_attention,
    (
        Implementation("triton", "ridgeline.kernels.linear_attention.triton:linear_attention", on_gpu),
        Implementation("torch", "ridgeline.kernels.linear_attention.torch_ops:linear_attention"),
        Implementation(
            "batch_invariant", "ridgeline.kernels.linear_attention.triton:linear_attention_in_order", on_gpu
        ),
        Implementation(
            "triton_training", "ridgeline.kernels.linear_attention.triton_training:linear_attention", on_gpu
        ),
    ),
)
