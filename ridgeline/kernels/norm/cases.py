"""Cases of the norms, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NormCase:
    """A case for tests and benchmarks.

    heads: x is [T, heads, M], as for a norm of queries and keys.
    weight_float32: the weight is float32, whatever the dtype of x is.
    """

    tokens: int
    width: int
    residual: bool = False
    heads: int | None = None
    eps: float = 1e-6
    weight_float32: bool = False

    def inputs(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Tensor | None, Tensor, float]:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        weight_dtype = torch.float32 if self.weight_float32 else dtype
        shape = (self.tokens, self.width) if self.heads is None else (self.tokens, self.heads, self.width)
        residual = normal(*shape) if self.residual else None
        return normal(*shape), residual, normal(self.width, dtype=weight_dtype), self.eps

    def layer_inputs(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, float]:
        x_TM, residual_TM, weight_M, eps = self.inputs(dtype, device, seed)
        return x_TM, residual_TM, weight_M, weight_M.flip(0), eps


CASES = (
    NormCase(1, 64),
    NormCase(5, 96, residual=True),
    NormCase(33, 128, heads=4),
    NormCase(16, 768, residual=True, eps=1e-5),
    NormCase(8, 4096, residual=True),
    NormCase(9, 160, residual=True, weight_float32=True),
)
