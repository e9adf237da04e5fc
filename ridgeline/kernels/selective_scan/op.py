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

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.op import Implementation, Op, on_gpu
from ridgeline.kernels.turns import Turns


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


SELECTIVE_SCAN = Op(
    "selective_scan",
    selective_scan,
    (
        Implementation("triton", "ridgeline.kernels.selective_scan.triton:selective_scan", on_gpu),
        Implementation("batch_invariant", "ridgeline.kernels.selective_scan.batch_invariant:selective_scan", on_gpu),
        Implementation("torch", "ridgeline.kernels.selective_scan.torch_ops:selective_scan"),
    ),
)
