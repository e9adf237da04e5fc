"""Cases of products of int8 levels, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.gemm.w8a8.op import LEVELS


@dataclass(frozen=True)
class W8A8Case:
    """A case for tests and benchmarks."""

    tokens: int
    in_width: int
    out_width: int
    bias: bool = False

    def inputs(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return random inputs, with scales such that outputs have a standard deviation of about one."""
        generator = torch.Generator(device).manual_seed(seed)
        levels = torch.randint(-LEVELS, LEVELS + 1, (self.out_width, self.in_width), generator=generator, device=device)
        scale_O = (0.5 + torch.rand(self.out_width, generator=generator, device=device)) / LEVELS
        x_TI = torch.randn(self.tokens, self.in_width, generator=generator, device=device).to(dtype)
        bias_O = torch.randn(self.out_width, generator=generator, device=device).to(dtype) if self.bias else None
        return x_TI, levels.to(torch.int8), scale_O * (3 / self.in_width) ** 0.5, bias_O


CASES = (
    W8A8Case(1, 64, 64),
    W8A8Case(1, 200, 48),
    W8A8Case(3, 64, 192, bias=True),
    W8A8Case(7, 36, 20),
    W8A8Case(8, 1024, 72),
    W8A8Case(40, 768, 2304, bias=True),
    W8A8Case(256, 1024, 512),
)
