"""Cases of products with FP8 weights, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.core.weight_format import Fp8Format
from ridgeline.kernels.fp8_gemm.op import BY_TOKEN, IN_BLOCKS, LARGEST, Fp8, to_fp8


@dataclass(frozen=True)
class Fp8Case:
    """A case of `fp8_linear` for tests and benchmarks."""

    tokens: int
    in_width: int
    out_width: int
    format: Fp8Format = BY_TOKEN
    bias: bool = False

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, Fp8, Tensor | None]:
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
