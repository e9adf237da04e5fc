"""Cases of products with int8 weights, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.base.case import Cases, as_cases, generator
from ridgeline.kernels.gemm.fp8.cases import ROUNDING
from ridgeline.kernels.gemm.int8.op import KEPT, ROUNDED, RUN
from ridgeline.kernels.gemm.plain.cases import ALONE, NORMED, PROJECTIONS, ProductCase
from ridgeline.kernels.gemm.plain.levels import LEVELS, Levels


@dataclass(frozen=True)
class Int8Case(ProductCase):
    """A case of `int8_linear` for tests and benchmarks."""

    tokens: int
    in_width: int
    out_width: int
    bias: bool = False

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, Levels, Tensor | None]:
        """Return random inputs, with scales such that outputs have a standard deviation of about one."""
        made = generator(device, seed)
        shape = self.out_width, self.in_width
        level_OI = torch.randint(-LEVELS, LEVELS + 1, shape, generator=made, device=device).to(torch.int8)
        scale_O = (0.5 + torch.rand(self.out_width, generator=made, device=device)) / LEVELS
        x_TI = torch.randn(self.tokens, self.in_width, generator=made, device=device).to(dtype)
        bias_O = torch.randn(self.out_width, generator=made, device=device).to(dtype) if self.bias else None
        return x_TI, self.weight(level_OI, scale_O * (3 / self.in_width) ** 0.5, dtype), bias_O

    def weight(self, level_OI: Tensor, scale_O: Tensor, dtype: torch.dtype) -> Levels:
        """Return the weight as the op takes it."""
        filled_OJ = torch.nn.functional.pad(level_OI, (0, -self.in_width % RUN))
        return Levels(filled_OJ, scale_O.to(dtype), KEPT)

    def weight_bytes(self, itemsize: float) -> float:
        return self.out_width * (self.in_width + itemsize)


class W8A8Case(Int8Case):
    """A case of `w8a8_linear`."""

    def weight(self, level_OI: Tensor, scale_O: Tensor, dtype: torch.dtype) -> Levels:
        return Levels(level_OI, scale_O, ROUNDED)

    @property
    def in_bytes(self) -> bool:
        return True

    @property
    def form(self) -> str:
        return "int8"

    @property
    def slack(self) -> int:
        """One or two tokens may be left unrounded. An int8 step is smaller than FP8's for all but tiny numbers."""
        return ROUNDING


CASES = (
    Int8Case(1, 64, 64),
    Int8Case(1, 200, 48),
    Int8Case(3, 64, 192, bias=True),
    Int8Case(7, 36, 20),
    Int8Case(8, 1024, 72),
    Int8Case(40, 768, 2304, bias=True),
    Int8Case(256, 1024, 512),
)
W8A8_CASES = as_cases(W8A8Case, CASES)

SWEPT = [W8A8Case(t, i, o) for i, o in (*ALONE, *((i, o) for i, o, _ in NORMED)) for t in (1, 64, 8192)]

OP_CASES = {
    "int8_linear": Cases(CASES, [Int8Case(t, i, o) for i, o in PROJECTIONS for t in (1, 8, 64)]),
    # On a CPU the weight is packed once, with a model, so these are of a GPU alone
    "w8a8_linear": Cases(swept=[*SWEPT, W8A8Case(4096, 16_384, 7168)]),
}
