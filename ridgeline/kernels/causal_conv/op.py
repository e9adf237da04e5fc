"""The short causal convolution in front of recurrent mixers, over rows of unlike lengths.

Every channel is a sum of its last W inputs with weights of its own. A row's *tail* is what it keeps between steps: its
last W - 1 inputs.

Legend:
    N  block ids
    R  rows
    T  tokens of the step
    W  inputs that an output is made of
    w  W - 1
    X  channels
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.op import Implementation, Op, on_gpu
from ridgeline.kernels.turns import Turns


def causal_conv(
    x_TX: Tensor, weight_XW: Tensor, bias_X: Tensor | None, tails_NwX: Tensor, turns: Turns, activation: str | None
) -> Tensor:
    """Return y_TX, dense and of x's dtype: y[t] = act(bias + Σ_i weight[:, i] · x[t - w + i]). What comes before a
    row's first token is its tail, or zeros if the row is fresh. The new tails, oldest input first, replace the old.

    x_TX: [T, X]; a token's channels must lie side by side.
    weight_XW: dense; the last column belongs to the newest input.
    activation: "silu", or None for none.
    """
    act = activation_of(activation)
    before, weight = tails_NwX.shape[1], weight_XW.double()
    y_TX = torch.zeros_like(x_TX, memory_format=torch.contiguous_format)
    for row in turns.rows():
        tail_wX = tails_NwX[row.reads] if not row.fresh else torch.zeros_like(tails_NwX[0])
        inputs_TX = torch.cat((tail_wX.to(x_TX.dtype), x_TX[row.start : row.end]))
        for token in range(row.start, row.end):
            last = token - row.start + before
            sum_X = (inputs_TX[last - before : last + 1].double() * weight.T).sum(0)
            y_TX[token] = act(sum_X if bias_X is None else sum_X + bias_X.double()).to(y_TX.dtype)
        if row.mark:
            tails_NwX[row.marked] = inputs_TX[row.mark : row.mark + before]
        tails_NwX[row.writes] = inputs_TX[len(inputs_TX) - before :]
    return y_TX


def activation_of(name: str | None) -> Callable[[Tensor], Tensor]:
    """Return the function of an activation's name. Raises ValueError for names that do not exist."""
    if name not in ("silu", None):
        raise ValueError(f"a convolution has no activation {name!r}; known: 'silu', None.")
    return F.silu if name == "silu" else lambda x: x


CAUSAL_CONV = Op(
    "causal_conv",
    causal_conv,
    (
        Implementation("triton", "ridgeline.kernels.causal_conv.triton:causal_conv", on_gpu),
        Implementation("torch", "ridgeline.kernels.causal_conv.torch_ops:causal_conv"),
    ),
)
