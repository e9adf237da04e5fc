"""Linear map. Legend: T tokens, I inputs, O outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.op import Implementation, Op


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x · weightᵀ + bias: [T, O] in the dtype of `x_TI`; sums in float32."""
    y_TO = x_TI.float() @ weight_OI.float().T
    if bias_O is not None:
        y_TO = y_TO + bias_O.float()
    return y_TO.to(x_TI.dtype)


@dataclass(frozen=True)
class Case:
    tokens: int
    in_width: int
    out_width: int
    bias: bool = False

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
        """Weights scaled so that outputs have a standard deviation of about one."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        x_TI = normal(self.tokens, self.in_width).to(dtype)
        weight_OI = (normal(self.out_width, self.in_width) * self.in_width**-0.5).to(dtype)
        return x_TI, weight_OI, normal(self.out_width).to(dtype) if self.bias else None


CASES = (
    Case(1, 64, 64),
    Case(3, 64, 192, bias=True),
    Case(17, 768, 2304, bias=True),
    Case(1, 4096, 6144),
    Case(256, 1024, 3072),
)

LINEAR = Op(
    "linear",
    linear,
    (Implementation("torch", "torch.nn.functional:linear"),),
)
