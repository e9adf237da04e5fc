"""Cases of products with int8 weights, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.base.case import Cases
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.gemm.int8.cost import int8_linear_cost
from ridgeline.kernels.gemm.int8.op import LEVELS, RUN
from ridgeline.kernels.gemm.plain.cases import PROJECTIONS, ProductCase


@dataclass(frozen=True)
class Int8Case(ProductCase):
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
        level_OJ = torch.zeros(self.out_width, -(-self.in_width // RUN) * RUN, dtype=torch.int8, device=device)
        level_OJ[:, : self.in_width] = torch.randint(
            -LEVELS, LEVELS + 1, (self.out_width, self.in_width), generator=generator, device=device
        )
        spread = LEVELS * (self.in_width / 3) ** 0.5
        scale_O = (0.5 + torch.rand(self.out_width, generator=generator, device=device)) / spread
        x_TI = torch.randn(self.tokens, self.in_width, generator=generator, device=device).to(dtype)
        bias_O = torch.randn(self.out_width, generator=generator, device=device).to(dtype) if self.bias else None
        return x_TI, level_OJ, scale_O.to(dtype), bias_O

    def cost(self, itemsize: int) -> Cost:
        return int8_linear_cost(self.tokens, self.in_width, self.out_width, itemsize=itemsize, bias=self.bias)


CASES = (
    Int8Case(1, 64, 64),
    Int8Case(1, 200, 48),
    Int8Case(3, 64, 192, bias=True),
    Int8Case(7, 36, 20),
    Int8Case(8, 1024, 72),
    Int8Case(40, 768, 2304, bias=True),
    Int8Case(256, 1024, 512),
)

OP_CASES = {"int8_linear": Cases(CASES, [Int8Case(t, i, o) for i, o in PROJECTIONS for t in (1, 8, 64)])}
