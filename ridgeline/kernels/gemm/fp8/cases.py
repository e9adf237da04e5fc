"""Cases of products with FP8 weights, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.base.case import Cases, as_cases, generator
from ridgeline.kernels.base.weight_format import Fp8Format, Held
from ridgeline.kernels.gemm.fp8.op import BY_TOKEN, IN_BLOCKS, LARGEST, in_buffer, to_fp8
from ridgeline.kernels.gemm.plain.cases import ALONE, NORMED, PROJECTIONS, NormedProductCase, ProductCase
from ridgeline.kernels.gemm.plain.rounded import Rounded, buffer

ROUNDING = 1 << 22  # see `Fp8Case.slack`


@dataclass(frozen=True)
class Fp8Case(ProductCase):
    """A case of `fp8_linear` for tests and benchmarks.

    fed: the op before has rounded the activations; of a product with a norm: there is a buffer for what it rounds.
    """

    tokens: int
    in_width: int
    out_width: int
    format: Fp8Format = BY_TOKEN
    bias: bool = False
    gate: str | None = "silu"
    fed: bool = False

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Return random inputs, with weights scaled so that outputs have a standard deviation of about one."""
        made = generator(device, seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=made, device=device)

        x_TI = normal(self.tokens, self.in_width).to(dtype)
        matrix_OI = normal(self.out_width, self.in_width) * self.in_width**-0.5
        static = self.format.activations == "static"
        x_scale = torch.tensor(3.0 / LARGEST, device=device) if static else None
        bias_O = normal(self.out_width).to(dtype) if self.bias else None
        return self.handed(x_TI), to_fp8(matrix_OI, self.format, x_scale), bias_O

    def handed(self, x_TI: Tensor) -> Tensor | Rounded:
        """Return the activations as the op before leaves them."""
        if not self.fed:
            return x_TI
        given = buffer(self.tokens, self.in_width, x_TI.dtype, x_TI.device)
        in_buffer(x_TI, given)
        return given

    @property
    def in_bytes(self) -> bool:
        return self.format.activations is not None

    @property
    def form(self) -> str:
        if self.format.activations is None or self.fed:
            return "fed" if self.fed else ""
        return "block" if self.format.block else self.format.activations

    @property
    def shape(self) -> str:
        """The label without the bias."""
        how = "blocks" if self.format.block else str(self.format.activations)
        return f"{super().shape} {how}" + (" fed" if self.fed else "")

    @property
    def slack(self) -> int:
        """An implementation may leave activations unrounded. Rounding moves a result by up to 1 / 28 of its standard
        deviation in the mean square, and one in millions by six times that."""
        return self.in_width if self.format.activations is None else ROUNDING

    def weight_bytes(self, itemsize: float) -> float:
        return Held(format=self.format).num_bytes(self.out_width, self.in_width)


class Fp8NormCase(NormedProductCase, Fp8Case):
    """The same with a norm, a residual and a gate."""

    def handed(self, x_TI: Tensor) -> Tensor:
        return x_TI

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        operand, weight, epilogue = super().inputs(dtype, device, seed)
        if self.fed:
            epilogue = epilogue._replace(buffer=buffer(self.tokens, self.result_width, dtype, device))
        return operand, weight, epilogue

    def written(self, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Return the numbers that stand for the rounded result."""
        given = arguments[2].buffer
        return () if given is None else (given.wide().to(given.dtype),)


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

TIMED = (1, 8, 64, 256, 1024, 8192, 16, 32, 128, 512)
FED = [t for t in TIMED if t <= 256]  # tokens for which the op before rounds
SWEPT = [
    *(Fp8Case(t, i, o, how) for i, o in ALONE for how in (BY_TOKEN, IN_BLOCKS) for t in TIMED),
    *(Fp8Case(t, i, o, fed=True) for i, o in ALONE for t in FED),
    *(Fp8Case(t, 4096, 4096, IN_BLOCKS, fed=True) for t in FED),
    *(Fp8Case(4096, 16_384, 7168, how) for how in (BY_TOKEN, IN_BLOCKS)),
]
NORM_SWEPT = [
    *(Fp8NormCase(t, i, o, how, gate=g) for i, o, g in NORMED for how in (BY_TOKEN, IN_BLOCKS) for t in TIMED),
    *(Fp8NormCase(t, i, o, gate=g, fed=True) for i, o, g in NORMED if g for t in FED),
]

OP_CASES = {
    "fp8_linear": Cases(CASES, REAL, SWEPT),
    "fp8_norm_linear": Cases(as_cases(Fp8NormCase, CASES), as_cases(Fp8NormCase, REAL), NORM_SWEPT),
}
