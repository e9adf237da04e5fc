"""The recurrence of Mamba-2, over rows of unlike lengths.

A head's state is a matrix. Each token lets it decay by one number, and adds the head's input along a direction that
the heads of a group share.

Dao and Gu, "Transformers are SSMs", arXiv 2405.21060.

Legend:
    G  groups of heads; head h is of group h // (H / G)
    H  heads
    N  block ids
    P  head width
    R  rows
    S  state width
    T  tokens of the step
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.op import Implementation, Op, on_gpu
from ridgeline.kernels.turns import Turns, turns_of


def ssd(
    x_THP: Tensor,
    dt_TH: Tensor,
    rate_H: Tensor,
    b_TGS: Tensor,
    c_TGS: Tensor,
    skip_H: Tensor,
    dt_bias_H: Tensor,
    dt_min: float,
    dt_max: float,
    states_NHPS: Tensor,
    turns: Turns,
) -> Tensor:
    """Return y_THP, dense and of x's dtype, and replace the rows' states.

    With Δ = softplus(dt + dt_bias), but at least dt_min and at most dt_max, each token does in each head

        S ← exp(Δ · rate) · S + Δ · x ⊗ b;    y = S c + skip · x

    x_THP, b_TGS, c_TGS, dt_TH: a token's numbers must lie side by side.
    rate_H: negative; -exp(A_log) of checkpoints.
    states_NHPS: float32. It may be strided by block id.
    """
    share = x_THP.shape[1] // b_TGS.shape[1]
    b_THS, c_THS = (v.double().repeat_interleave(share, dim=1) for v in (b_TGS, c_TGS))
    x, step_TH = x_THP.double(), step_of(dt_TH.double(), dt_bias_H.double(), dt_min, dt_max)
    decay_TH = (step_TH * rate_H.double()).exp()
    y_THP = torch.zeros_like(x_THP, memory_format=torch.contiguous_format)
    for row in turns.rows():
        state = (torch.zeros_like(states_NHPS[0]) if row.fresh else states_NHPS[row.reads]).double()
        for token in range(row.start, row.end):
            added_HP = step_TH[token, :, None] * x[token]
            state = decay_TH[token, :, None, None] * state + added_HP[:, :, None] * b_THS[token, :, None]
            y_HP = torch.einsum("hps,hs->hp", state, c_THS[token]) + skip_H.double()[:, None] * x[token]
            y_THP[token] = y_HP.to(y_THP.dtype)
            if token + 1 - row.start == row.mark:
                states_NHPS[row.marked] = state.to(states_NHPS.dtype)
        states_NHPS[row.writes] = state.to(states_NHPS.dtype)
    return y_THP


def step_of(dt_TH: Tensor, dt_bias_H: Tensor, dt_min: float, dt_max: float) -> Tensor:
    """Return the size of each token's step."""
    return F.softplus(dt_TH + dt_bias_H).clamp(dt_min, dt_max)


@dataclass(frozen=True)
class Case:
    """A case for tests and benchmarks.

    rows: the tokens of each row.
    heads: H. groups: G. head_width: P. state_width: S.
    marks: the mark of each row; (): no row has one.
    fresh: the rows that begin with zeros.
    padding: tokens behind the last row's.
    dt_min, dt_max: bounds of a token's step.
    fast: so many times faster than usual states are forgotten.
    """

    rows: tuple[int, ...]
    heads: int = 4
    groups: int = 1
    head_width: int = 16
    state_width: int = 32
    marks: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    padding: int = 0
    dt_min: float = 0.0
    dt_max: float = float("inf")
    fast: float = 1.0

    def inputs(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, float, Tensor, Turns]:
        """x, b and c are views of one tensor, as a convolution leaves them."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        turns = turns_of(self.rows, device, self.marks, self.fresh, self.padding)
        tokens, heads, shared = turns.num_tokens, self.heads, self.groups * self.state_width
        x, b, c = normal(tokens, heads * self.head_width + 2 * shared).to(dtype).split(
            (heads * self.head_width, shared, shared), dim=1
        )  # fmt: skip
        states_NHPS = normal(3 * turns.num_rows + 2, heads, self.head_width, self.state_width)
        states_NHPS[turns.reads_R[turns.fresh_R]] = torch.nan
        rate_H = -self.fast * torch.linspace(1, 16, heads, device=device)
        return (
            x.unflatten(1, (heads, -1)), normal(tokens, heads).to(dtype), rate_H,
            b.unflatten(1, (self.groups, -1)), c.unflatten(1, (self.groups, -1)),
            normal(heads), normal(heads) - 3, self.dt_min, self.dt_max, states_NHPS, turns,
        )  # fmt: skip


CASES = (
    Case((1,)),
    Case((1, 1, 1), heads=6, groups=3, fresh=(1,), dt_max=0.1),
    Case((5, 1, 0, 130, 2), groups=2, marks=(2, 1, 0, 64, 0), fresh=(0, 3), padding=3),
    Case((70, 3, 1, 65), heads=2, head_width=32, state_width=16, marks=(70, 1, 0, 30), fresh=(1,), fast=30.0),
    Case((300,), heads=2, state_width=64, dt_min=0.01),
)

SSD = Op(
    "ssd",
    ssd,
    (
        Implementation("triton", "ridgeline.kernels.ssd.triton:ssd", on_gpu),
        Implementation("batch_invariant", "ridgeline.kernels.ssd.batch_invariant:ssd", on_gpu),
        Implementation("torch", "ridgeline.kernels.ssd.torch_ops:ssd"),
    ),
)
