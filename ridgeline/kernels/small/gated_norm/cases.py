"""Cases of the gated norm, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.base.case import Cases, OpCase
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.small.gated_norm.cost import gated_norm_cost


@dataclass(frozen=True)
class GatedNormCase(OpCase):
    """A case for tests and benchmarks.

    heads: x is [T, heads, M].
    strided: z is a view of wider rows.
    """

    tokens: int
    width: int
    group: int
    norm_before_gate: bool = True
    heads: int | None = None
    gate: str = "silu"
    strided: bool = False

    def inputs(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, float, int, bool, str]:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        x_TM, z_TM = (normal(self.tokens, (self.heads or 1) * self.width + 8 * self.strided * i) for i in range(2))
        z_TM = z_TM[:, : (self.heads or 1) * self.width]
        if self.heads is not None:
            x_TM, z_TM = (each.unflatten(1, (self.heads, -1)) for each in (x_TM, z_TM))
        return x_TM, z_TM, normal(self.width), 1e-6, self.group, self.norm_before_gate, self.gate

    @property
    def label(self) -> str:
        return f"{self.tokens}x{self.heads or 1}x{self.width}"

    def cost(self, itemsize: int) -> Cost:
        return gated_norm_cost(self.tokens * (self.heads or 1), self.width, itemsize=itemsize)


CASES = (
    GatedNormCase(1, 64, 64),
    GatedNormCase(5, 128, 128, heads=4, strided=True),
    GatedNormCase(33, 96, 32, norm_before_gate=False, strided=True),
    GatedNormCase(7, 1536, 1536, norm_before_gate=False),
    GatedNormCase(3, 320, 80, gate="sigmoid"),
)

OP_CASES = {"gated_norm": Cases(CASES, [GatedNormCase(t, 128, 128, heads=32) for t in (1, 64, 256, 8192)])}
