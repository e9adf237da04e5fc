"""Cases of products with FP8 weights, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.base.case import Cases, as_cases
from ridgeline.kernels.base.weight_format import Fp8Format, Held
from ridgeline.kernels.gemm.fp8.op import BY_TOKEN, IN_BLOCKS, LARGEST, to_fp8
from ridgeline.kernels.gemm.plain.cases import PROJECTIONS, NormedProductCase, ProductCase


@dataclass(frozen=True)
class Fp8Case(ProductCase):
    """A case of `fp8_linear` for tests and benchmarks."""

    tokens: int
    in_width: int
    out_width: int
    format: Fp8Format = BY_TOKEN
    bias: bool = False

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Return random inputs, with weights scaled so that outputs have a standard deviation of about one."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        x_TI = normal(self.tokens, self.in_width).to(dtype)
        matrix_OI = normal(self.out_width, self.in_width) * self.in_width**-0.5
        static = self.format.activations == "static"
        x_scale = torch.tensor(3.0 / LARGEST, device=device) if static else None
        bias_O = normal(self.out_width).to(dtype) if self.bias else None
        return x_TI, to_fp8(matrix_OI, self.format, x_scale), bias_O

    @property
    def shape(self) -> str:
        """The label without the bias."""
        how = "blocks" if self.format.block else str(self.format.activations)
        return f"{super().shape} {how}"

    @property
    def slack(self) -> int:
        """An implementation may leave activations unrounded. Rounding moves a result by up to 1 / 28 of its standard
        deviation in the mean square, and one in millions by six times that."""
        return self.in_width if self.format.activations is None else 1 << 22

    def weight_bytes(self, itemsize: float) -> float:
        return Held(format=self.format).num_bytes(self.out_width, self.in_width)


class Fp8NormCase(NormedProductCase, Fp8Case):
    """The same with a norm, a residual and a gate."""


CASES = (
    Fp8Case(1, 256, 64),
    Fp8Case(3, 256, 192, bias=True),
    Fp8Case(8, 1024, 72, Fp8Format(activations="static")),
    Fp8Case(1, 384, 48, Fp8Format(activations=None)),
    Fp8Case(2, 256, 128, IN_BLOCKS),
    Fp8Case(17, 384, 320, IN_BLOCKS, bias=True),
    Fp8Case(40, 768, 256),
    Fp8Case(256, 1024, 512),
)

REAL = [Fp8Case(t, i, o, how) for i, o in PROJECTIONS for how in (BY_TOKEN, IN_BLOCKS) for t in (1, 8, 64, 256, 8192)]

OP_CASES = {
    "fp8_linear": Cases(CASES, REAL),
    "fp8_norm_linear": Cases(as_cases(Fp8NormCase, CASES), as_cases(Fp8NormCase, REAL)),
}
