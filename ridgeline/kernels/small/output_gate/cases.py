"""Cases of the output gate, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.base.case import Cases, OpCase
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.small.output_gate.cost import output_gate_cost


@dataclass(frozen=True)
class OutputGateCase(OpCase):
    """A case for tests and benchmarks. beside: columns of other projections beside those of the gate."""

    tokens: int
    width: int
    beside: int = 0

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return random inputs with a standard deviation of 3. The gate is a view of a fused projection."""
        generator = torch.Generator(device).manual_seed(seed)
        shape = self.tokens, 2 * self.width + self.beside
        both = (3 * torch.randn(shape, generator=generator, device=device)).to(dtype)
        return both[:, -self.width :].contiguous(), both[:, : self.width]

    @property
    def label(self) -> str:
        return f"{self.tokens}x{self.width}"

    @property
    def slack(self) -> int:
        return 16 * 16

    def cost(self, itemsize: int) -> Cost:
        return output_gate_cost(self.tokens, self.width, itemsize=itemsize)


CASES = (OutputGateCase(1, 64), OutputGateCase(7, 352, 16), OutputGateCase(33, 4096, 2048))

OP_CASES = {"output_gate": Cases(CASES, [OutputGateCase(t, 4096, 2048) for t in (1, 64, 256, 8192)])}
