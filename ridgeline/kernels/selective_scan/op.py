"""The selective scan of Mamba, over rows of unlike lengths.

Every channel has a small state of its own. Each token lets it decay and adds the channel's input along a direction;
how fast, how much and along which direction depends on the token.

Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv 2312.00752.

Legend:
    N  block ids
    R  rows
    S  numbers of a channel's state
    T  tokens of the step
    X  channels
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.op import Implementation, Op, on_gpu
from ridgeline.kernels.turns import Turns, turns_of


def selective_scan(
    x_TX: Tensor,
    dt_TX: Tensor,
    rate_XS: Tensor,
    b_TS: Tensor,
    c_TS: Tensor,
    skip_X: Tensor,
    dt_bias_X: Tensor | None,
    z_TX: Tensor | None,
    states_NXS: Tensor,
    turns: Turns,
) -> Tensor:
    """Return y_TX, dense and of x's dtype, and replace the rows' states.

    With Δ = softplus(dt + dt_bias), each token does in each channel

        S ← exp(Δ · rate) · S + Δ · x · b;    y = S · c + skip · x;    y ← y · silu(z), if there is a z

    x_TX, dt_TX, b_TS, c_TS, z_TX: a token's numbers must lie side by side.
    rate_XS: negative; -exp(A_log) of checkpoints. Dense.
    states_NXS: float32. It may be strided by block id.
    """
    x, b, c = (v.double() for v in (x_TX, b_TS, c_TS))
    dt_TX = F.softplus(dt_TX.double() if dt_bias_X is None else dt_TX.double() + dt_bias_X.double())
    y_TX = torch.zeros_like(x_TX, memory_format=torch.contiguous_format)
    for row in turns.rows():
        state = (torch.zeros_like(states_NXS[0]) if row.fresh else states_NXS[row.reads]).double()
        for token in range(row.start, row.end):
            step_X1 = dt_TX[token, :, None]
            state = (step_X1 * rate_XS.double()).exp() * state + step_X1 * x[token, :, None] * b[token]
            y_X = state @ c[token] + skip_X.double() * x[token]
            y_TX[token] = (y_X if z_TX is None else y_X * F.silu(z_TX[token].double())).to(y_TX.dtype)
            if token + 1 - row.start == row.mark:
                states_NXS[row.marked] = state.to(states_NXS.dtype)
        states_NXS[row.writes] = state.to(states_NXS.dtype)
    return y_TX


@dataclass(frozen=True)
class Case:
    """A case for tests and benchmarks.

    rows: the tokens of each row.
    channels: X. state_width: S.
    gated: there is a z. bias: there is a bias of dt.
    marks: the mark of each row; (): no row has one.
    fresh: the rows that begin with zeros.
    padding: tokens behind the last row's.
    fast: so many times faster than usual states are forgotten.
    """

    rows: tuple[int, ...]
    channels: int = 64
    state_width: int = 16
    gated: bool = True
    bias: bool = True
    marks: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    padding: int = 0
    fast: float = 1.0

    def inputs(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> tuple[
        Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Turns
    ]:  # fmt: skip
        """b and c are views of one tensor, and so are x and z, as projections leave them."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        turns = turns_of(self.rows, device, self.marks, self.fresh, self.padding)
        tokens, channels, width = turns.num_tokens, self.channels, self.state_width
        x_TX, z_TX = normal(tokens, 2 * channels).to(dtype).split(channels, dim=1)
        b_TS, c_TS = normal(tokens, 2 * width).to(dtype).split(width, dim=1)
        rate_XS = -self.fast * torch.arange(1, width + 1, device=device).float().repeat(channels, 1)
        states_NXS = normal(3 * turns.num_rows + 2, channels, width)
        states_NXS[turns.reads_R[turns.fresh_R]] = torch.nan
        return (
            x_TX, normal(tokens, channels).to(dtype), rate_XS, b_TS, c_TS, normal(channels),
            normal(channels) - 3 if self.bias else None, z_TX if self.gated else None, states_NXS, turns,
        )  # fmt: skip


CASES = (
    Case((1,), channels=32),
    Case((1, 1, 1), channels=96, gated=False, fresh=(1,)),
    Case((5, 1, 0, 130, 2), marks=(2, 1, 0, 64, 0), fresh=(0, 3), padding=3),
    Case((70, 3, 1, 65), channels=40, bias=False, marks=(70, 1, 0, 30), fresh=(1,), fast=30.0),
    Case((150,), channels=24, state_width=8),
)

SELECTIVE_SCAN = Op(
    "selective_scan",
    selective_scan,
    (
        Implementation("triton", "ridgeline.kernels.selective_scan.triton:selective_scan", on_gpu),
        Implementation("batch_invariant", "ridgeline.kernels.selective_scan.batch_invariant:selective_scan", on_gpu),
        Implementation("torch", "ridgeline.kernels.selective_scan.torch_ops:selective_scan"),
    ),
)
