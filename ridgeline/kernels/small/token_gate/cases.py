"""Cases of the gate of a token, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.base.case import Cases, OpCase
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.small.token_gate.cost import token_gate_cost


@dataclass(frozen=True)
class TokenGateCase(OpCase):
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

    @property
    def label(self) -> str:
        return f"{self.tokens}x{self.width}"

    @property
    def slack(self) -> int:
        return 16 * 16

    def cost(self, itemsize: int) -> Cost:
        return token_gate_cost(self.tokens, self.width, itemsize=itemsize)


CASES = (TokenGateCase(1, 64), TokenGateCase(7, 1400), TokenGateCase(33, 2048))

OP_CASES = {"token_gate": Cases(CASES, [TokenGateCase(t, 2048) for t in (1, 64, 256, 8192)])}
