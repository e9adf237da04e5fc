"""Cases of the norms, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ridgeline.kernels.base.case import Cases, OpCase, as_cases
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.small.norm.cost import norm_cost


@dataclass(frozen=True)
class NormCase(OpCase):
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

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        weight_dtype = torch.float32 if self.weight_float32 else dtype
        shape = (self.tokens, self.width) if self.heads is None else (self.tokens, self.heads, self.width)
        residual = normal(*shape) if self.residual else None
        return normal(*shape), residual, normal(self.width, dtype=weight_dtype), self.eps

    @property
    def label(self) -> str:
        return f"{self.tokens * (self.heads or 1)}x{self.width}" + (" +residual" if self.residual else "")

    def cost(self, itemsize: int) -> Cost:
        return self._cost(itemsize, "rms")

    def _cost(self, itemsize: int, kind: Literal["rms", "layer"]) -> Cost:
        rows = self.tokens * (self.heads or 1)
        return norm_cost(rows, self.width, itemsize=itemsize, kind=kind, residual=self.residual)


class LayerNormCase(NormCase):
    """The same of `layer_norm`."""

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        x_TM, residual_TM, weight_M, eps = super().inputs(dtype, device, seed)
        return x_TM, residual_TM, weight_M, weight_M.flip(0), eps

    def cost(self, itemsize: int) -> Cost:
        return self._cost(itemsize, "layer")


CASES = (
    NormCase(1, 64),
    NormCase(5, 96, residual=True),
    NormCase(33, 128, heads=4),
    NormCase(16, 768, residual=True, eps=1e-5),
    NormCase(8, 4096, residual=True),
    NormCase(9, 160, residual=True, weight_float32=True),
)
LAYER_CASES = as_cases(LayerNormCase, CASES)

OP_CASES = {
    "rms_norm": Cases(CASES, [NormCase(t, 4096, residual=True) for t in (1, 64, 256, 8192)]),
    "layer_norm": Cases(LAYER_CASES),
}
