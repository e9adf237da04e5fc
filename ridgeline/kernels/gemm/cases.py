"""Cases of products with plain weights, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearCase:
    """A case of `linear` for tests and benchmarks."""

    tokens: int
    in_width: int
    out_width: int
    bias: bool = False

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return random inputs, with weights scaled so that outputs have a standard deviation of about one."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        x_TI = normal(self.tokens, self.in_width).to(dtype)
        weight_OI = (normal(self.out_width, self.in_width) * self.in_width**-0.5).to(dtype)
        return x_TI, weight_OI, normal(self.out_width).to(dtype) if self.bias else None


@dataclass(frozen=True)
class NormLinearCase:
    """A case of `norm_linear` for tests and benchmarks.

    out_width: the columns of the result. The weight has twice as many rows if the op is gated.
    norm_float32: the norm's weight is float32, whatever the activations are.
    norm: False: there is no norm.
    """

    tokens: int
    in_width: int
    out_width: int
    bias: bool = False
    residual: bool = True
    gate: str | None = None
    eps: float = 1e-6
    norm_float32: bool = False
    norm: bool = True

    def inputs(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Tensor | None, Tensor | None, float, Tensor, Tensor | None, str | None]:
        """Return random inputs, with a norm weight around one."""
        generator = torch.Generator(device).manual_seed(seed)
        rows = self.out_width * (2 if self.gate else 1)
        x_TI, weight_OI, bias_O = LinearCase(self.tokens, self.in_width, rows, self.bias).inputs(dtype, device, seed)
        residual_TI = torch.randn(x_TI.shape, generator=generator, device=device).to(dtype) if self.residual else None
        norm_weight_I = 1 + 0.3 * torch.randn(self.in_width, generator=generator, device=device)
        norm_weight_I = norm_weight_I.to(torch.float32 if self.norm_float32 else dtype)
        return x_TI, residual_TI, norm_weight_I if self.norm else None, self.eps, weight_OI, bias_O, self.gate


CASES = (
    LinearCase(1, 64, 64),
    LinearCase(1, 200, 48),
    LinearCase(3, 64, 192, bias=True),
    LinearCase(2, 1032, 36),
    LinearCase(7, 36, 20),
    LinearCase(8, 1024, 72),
    LinearCase(17, 768, 2304, bias=True),
    LinearCase(1, 4096, 192),
    LinearCase(256, 1024, 3072),
)


NORM_CASES = (
    NormLinearCase(1, 64, 64, residual=False),
    NormLinearCase(1, 1024, 24, gate="silu"),
    NormLinearCase(2, 200, 48, bias=True),
    NormLinearCase(3, 96, 36, bias=True, gate="gelu", eps=0.5),
    NormLinearCase(7, 36, 20),
    NormLinearCase(8, 640, 72, gate="silu"),
    NormLinearCase(17, 328, 72, bias=True, gate="gelu_tanh"),
    NormLinearCase(2, 328, 72, gate="gelu_tanh", norm_float32=True),
    NormLinearCase(1, 1032, 40, norm_float32=True),
    NormLinearCase(40, 512, 48, residual=False),
    NormLinearCase(300, 64, 64, gate="silu"),
    NormLinearCase(1, 1024, 24, gate="silu", residual=False, norm=False),
    NormLinearCase(3, 96, 36, bias=True, gate="gelu", norm=False),
    NormLinearCase(40, 512, 48, gate="silu", residual=False, norm=False),
)
