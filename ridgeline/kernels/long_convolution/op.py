"""Hyena's long convolution, over rows of unlike lengths: every channel by itself with a filter as long as the row.

A row runs from its beginning as a whole, since there is no state of constant size that could stand for the tokens
before it (docs/recurrent-math.md).

Poli et al., "Hyena Hierarchy", arXiv 2302.10866.

Legend:
    L  length of the filters
    R  rows
    T  tokens of the step
    X  channels
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.op import Implementation, Op
from ridgeline.kernels.turns import Turns


def long_convolution(x_TX: Tensor, filter_XL: Tensor, skip_X: Tensor, turns: Turns) -> Tensor:
    """Return y_TX, dense and of x's dtype: y of a row's token i is Σ_j filter[j] · x[i - j] + skip · x[i], over the
    j up to i. All rows begin here. Raises ValueError for a row that is longer than the filters."""
    y_TX = torch.zeros_like(x_TX, memory_format=torch.contiguous_format)
    for row in turns.rows():
        check_length(row.end - row.start, filter_XL)
        x = x_TX[row.start : row.end].double()
        for place in range(len(x)):
            weight_iX = filter_XL.double()[:, : place + 1].flip(1).T
            y_TX[row.start + place] = ((weight_iX * x[: place + 1]).sum(0) + skip_X.double() * x[place]).to(x_TX.dtype)
    return y_TX


def check_length(length: int, filter_XL: Tensor) -> None:
    """Raise ValueError if the filters are shorter than a row."""
    if length > filter_XL.shape[1]:
        raise ValueError(f"a row has {length} tokens, and the filters reach {filter_XL.shape[1]}; give longer filters.")


LONG_CONVOLUTION = Op(
    "long_convolution",
    long_convolution,
    (Implementation("fft", "ridgeline.kernels.long_convolution.fft:long_convolution"),),
)
