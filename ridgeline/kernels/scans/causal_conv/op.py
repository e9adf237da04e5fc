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
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.base.op import Implementation, Op, on_gpu
from ridgeline.kernels.scans.metadata import Inputs, ScanMetadata
from ridgeline.kernels.scans.recurrence import begun, recurrence


@dataclass(frozen=True)
class ConvInputs(Inputs):
    """x_TX: [T, X]; a token's channels must lie side by side. weight_XW: dense; the last column belongs to the newest
    input. activation: "silu", or None for none."""

    x_TX: Tensor
    weight_XW: Tensor
    bias_X: Tensor | None
    activation: str | None
    of_tokens = ("x_TX",)


def causal_conv(given: ConvInputs, tails_NwX: Tensor, metadata: ScanMetadata) -> Tensor:
    """Return y_TX, dense and of x's dtype: y[t] = act(bias + Σ_i weight[:, i] · x[t - w + i]). What comes before a
    row's first token is its tail, or zeros if the row is fresh. The new tails, oldest input first, replace the old."""
    act, x_TX, weight_WX, bias_X = activation_of(given.activation), given.x_TX, given.weight_XW.double().T, given.bias_X

    def rule(token: int, tail_wX: Tensor) -> tuple[Tensor, Tensor]:
        inputs_WX = torch.cat((tail_wX, x_TX[token : token + 1]))
        sum_X = (inputs_WX.double() * weight_WX).sum(0)
        return act(sum_X if bias_X is None else sum_X + bias_X.double()), inputs_WX[1:]

    return recurrence(rule, tails_NwX, metadata, x_TX, lambda tail_wX, fresh: begun(tail_wX, fresh).to(x_TX.dtype))


def activation_of(name: str | None) -> Callable[[Tensor], Tensor]:
    """Return the function of an activation's name. Raises ValueError for names that do not exist."""
    if name not in ("silu", None):
        raise ValueError(f"a convolution has no activation {name!r}; known: 'silu', None.")
    return F.silu if name == "silu" else lambda x: x


CAUSAL_CONV = Op(
    "causal_conv",
    causal_conv,
    (
        Implementation("triton", "ridgeline.kernels.scans.causal_conv.triton:causal_conv", on_gpu),
        Implementation("torch", "ridgeline.kernels.scans.causal_conv.torch_ops:causal_conv"),
    ),
)
