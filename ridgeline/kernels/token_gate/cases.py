"""Cases of the gate of a token, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenGateCase:
    """A case for tests and benchmarks."""

    tokens: int
    width: int

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return random inputs, whose gates have a standard deviation of 2 before the sigmoid."""
        generator = torch.Generator(device).manual_seed(seed)
        y_TM, n_TM, weight_1M = (
            torch.randn(shape, generator=generator, device=device)
            for shape in ((self.tokens, self.width), (self.tokens, self.width), (1, self.width))
        )
        return (3 * y_TM).to(dtype), n_TM.to(dtype), (2 * self.width**-0.5 * weight_1M).to(dtype)


CASES = (TokenGateCase(1, 64), TokenGateCase(7, 1400), TokenGateCase(33, 2048))
