"""Cases of products with weights in codes, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.base.case import Cases, as_cases, generator
from ridgeline.kernels.base.weight_format import SUPER, CodedFormat, Held
from ridgeline.kernels.gemm.codes.op import (
    IQ2_S,
    IQ4_XS,
    MXFP4,
    NF4,
    NVFP4,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    W4,
    W4_ZEROS,
    W8,
    Coded,
    packed,
)
from ridgeline.kernels.gemm.plain.cases import ALONE, NORMED, PROJECTIONS, NormedProductCase, ProductCase


@dataclass(frozen=True)
class CodedCase(ProductCase):
    """A case of `coded_linear` for tests and benchmarks. The codes are random.

    scales: the dtype of the scales of formats that are not nested; uint8 is E8M0.
    """

    tokens: int
    in_width: int
    out_width: int
    format: CodedFormat
    bias: bool = False
    scales: torch.dtype = torch.float16
    ordered: bool = True
    gate: str | None = "silu"

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Return random inputs, with scales such that outputs have a standard deviation of about one."""
        made = generator(device, seed)
        x_TI = torch.randn(self.tokens, self.in_width, generator=made, device=device).to(dtype)
        bias_O = torch.randn(self.out_width, generator=made, device=device).to(dtype) if self.bias else None
        return x_TI, random_codes(self, device, made), bias_O

    @property
    def form(self) -> str:
        """The format's name; "" of those that no kernel for fragments takes."""
        return next((name for name, how in FORMS.items() if how == self.format), "")

    @property
    def shape(self) -> str:
        """The label without the bias."""
        how = f"{self.format.bits} bits, {self.format.values}, {self.format.zeros}"
        return f"{super().shape} {how}" + (" nested" if self.format.nested else "")

    @property
    def slack(self) -> int:
        """An implementation may round activations to int8, some dozens at a time. Their step is then about 1 / 60 of
        their standard deviation, which moves a result by 0.005 to 0.01 in the mean square, and one in millions by six
        times that."""
        return 1 << 20

    def weight_bytes(self, itemsize: float) -> float:
        scales = "int8" if self.format.nested else str(self.scales).removeprefix("torch.")
        return Held(format=self.format, scales=scales).num_bytes(self.out_width, self.in_width)


class CodedNormCase(NormedProductCase, CodedCase):
    """The same with a norm, a residual and a gate."""


def random_codes(case: CodedCase, device: torch.device, generator: torch.Generator | None) -> Coded:
    """Return the weight of a case."""
    how, rows, columns = case.format, case.out_width, case.in_width
    groups = columns // (how.group or columns)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    if how.values == "e4m3":  # every code but NaN, as weights have them
        numbers = torch.randn(rows, columns, generator=generator, device=device).mul_(64)
        code_OB = numbers.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        code_OB = packed(integers(0, 1 << how.bits, rows, columns), how.bits)
    middle = 1 << (how.bits - 1)
    spreads = {"levels": middle / 1.7, "e4m3": 64.0, "e2m1": 2.9, "fp4": 0.53, "nf4": 0.55, "iq2": 3.6, "iq4": 70.0}
    spread = spreads[how.values]
    step = columns**-0.5 / spread
    zero_OG = outer_OS = outer_minimum_OS = scale = None
    if how.nested:
        runs = columns // SUPER
        scale_OG = integers(1, 64, rows, groups).to(torch.int8)
        outer_OS = ((0.5 + uniform(rows, runs)) * step / 32).to(torch.float16)
        if how.zeros == "minimum":
            zero_OG = integers(0, 64, rows, groups).to(torch.int8)
            outer_minimum_OS = ((0.5 + uniform(rows, runs)) * step * middle / 32).to(torch.float16)
    elif case.scales == torch.uint8:
        scale_OG = integers(-1, 2, rows, groups).add(127).to(torch.uint8)
        scale = torch.tensor(step, device=device)
    else:
        values = (0.5 + uniform(rows, groups)) * step
        if case.scales == torch.float8_e4m3fn:
            values, scale = values / step, torch.tensor(step, device=device)
        scale_OG = values.to(case.scales)
        if how.zeros == "levels":
            zero_OG = integers(0, 1 << how.bits, rows, groups).to(torch.uint8)
        elif how.zeros == "minimum":
            zero_OG = (values * middle).to(case.scales)
    order_I = None if case.ordered else torch.randperm(columns, generator=generator, device=device).int()
    return Coded(code_OB, scale_OG, zero_OG, outer_OS, outer_minimum_OS, scale, order_I, how)


FORMS = {"W4": W4, "W4 zeros": W4_ZEROS, "MXFP4": MXFP4, "Q4_K": Q4_K, "W8": W8}  # those that a sweep times
SCALES = {MXFP4: torch.uint8}
TIMED = (1, 2, 4, 8, 16, 64, 256, 1024)

CASES = (
    CodedCase(1, 256, 64, W4),
    CodedCase(1, 512, 48, W4_ZEROS, bias=True),
    CodedCase(2, 256, 40, W8, scales=torch.bfloat16),
    CodedCase(3, 256, 64, NF4, scales=torch.float32),
    CodedCase(1, 256, 72, MXFP4, scales=torch.uint8),
    CodedCase(4, 256, 64, NVFP4, scales=torch.float8_e4m3fn),
    CodedCase(1, 512, 64, Q4_K),
    CodedCase(2, 512, 64, Q6_K),
    CodedCase(3, 256, 32, Q2_K),
    CodedCase(5, 256, 32, Q3_K),
    CodedCase(7, 256, 32, Q5_K),
    CodedCase(1, 256, 32, IQ4_XS),
    CodedCase(2, 256, 32, IQ2_S),
    CodedCase(8, 384, 64, CodedFormat(bits=4, group=0)),
    CodedCase(8, 512, 96, W4, ordered=False),
    CodedCase(40, 512, 256, W4, bias=True),
    CodedCase(256, 1024, 512, W4),
)

REAL = [CodedCase(t, i, o, how) for i, o in PROJECTIONS for how in (W4, Q4_K) for t in (1, 8, 64, 256, 8192)]

SWEPT = [
    CodedCase(t, i, o, how, scales=SCALES.get(how, torch.float16))
    for how in FORMS.values() for i, o in ALONE for t in TIMED
]  # fmt: skip
NORM_SWEPT = [
    CodedNormCase(t, i, o, how, scales=SCALES.get(how, torch.float16), gate=g)
    for how in FORMS.values() for i, o, g in NORMED for t in TIMED
]  # fmt: skip

OP_CASES = {
    "coded_linear": Cases(CASES, REAL, SWEPT),
    "coded_norm_linear": Cases(as_cases(CodedNormCase, CASES), as_cases(CodedNormCase, REAL), NORM_SWEPT),
}
