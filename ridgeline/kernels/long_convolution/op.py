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

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.op import Implementation, Op
from ridgeline.kernels.turns import Turns, turns_of


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


@dataclass(frozen=True)
class Case:
    """A case for tests and benchmarks. rows: the tokens of each row. padding: tokens behind the last row's."""

    rows: tuple[int, ...]
    channels: int = 24
    length: int = 160
    padding: int = 0

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Turns]:
        """Filters fade, as those of trained models do."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        turns = turns_of(self.rows, device, padding=self.padding, fresh=tuple(range(len(self.rows))))
        x_TX = normal(turns.num_tokens, self.channels)
        x_TX[sum(self.rows) :] = torch.nan
        fade_XL = -torch.linspace(0.01, 0.3, self.channels, device=device)[:, None] * torch.arange(
            self.length, device=device
        )
        return x_TX.to(dtype), normal(self.channels, self.length) * fade_XL.exp(), normal(self.channels), turns


CASES = (Case((1,)), Case((5, 1, 0, 130, 2), padding=3), Case((160, 33), channels=7))

LONG_CONVOLUTION = Op(
    "long_convolution",
    long_convolution,
    (Implementation("fft", "ridgeline.kernels.long_convolution.fft:long_convolution"),),
)
