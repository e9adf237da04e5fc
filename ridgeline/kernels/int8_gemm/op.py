"""A linear map whose weight is int8 levels, each row with a scale of its own. Activations stay as they are.

Legend:
    T  tokens
    I  inputs
    J  inputs, filled up with zeros to whole runs
    O  outputs
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.op import Implementation, Op, on_cpu

RUN = 32  # torch's kernel reads so many inputs at once; of a shorter run it reads beyond the end
LEVELS = 127  # levels to either side of zero


def int8_linear(x_TI: Tensor, level_OJ: Tensor, scale_O: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return x · (level · scale)ᵀ + bias: [T, O] in the dtype of `x_TI`. Sums are in float32.

    level_OJ: int8, with zeros behind the I inputs; J is the next multiple of RUN.
    scale_O: in the dtype of x.
    """
    y_TO = (x_TI.float() @ level_OJ[:, : x_TI.shape[1]].float().T) * scale_O.float()
    if bias_O is not None:
        y_TO = y_TO + bias_O.float()
    return y_TO.to(x_TI.dtype)


@dataclass(frozen=True)
class Case:
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


CASES = (
    Case(1, 64, 64),
    Case(1, 200, 48),
    Case(3, 64, 192, bias=True),
    Case(7, 36, 20),
    Case(8, 1024, 72),
    Case(40, 768, 2304, bias=True),
    Case(256, 1024, 512),
)

INT8_LINEAR = Op(
    "int8_linear",
    int8_linear,
    (Implementation("torch", "ridgeline.kernels.int8_gemm.torch_ops:int8_linear", on_cpu),),
)
