"""Cases of Hyena's long convolution, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.turns import Turns, turns_of


@dataclass(frozen=True)
class LongConvolutionCase:
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


CASES = (
    LongConvolutionCase((1,)),
    LongConvolutionCase((5, 1, 0, 130, 2), padding=3),
    LongConvolutionCase((160, 33), channels=7),
)
