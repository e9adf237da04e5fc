"""The gate of an expert that all tokens share: one number a token, which is a product of its own.

Legend:
    T  tokens
    M  model width
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.op import Implementation, Op, on_gpu


def token_gate(y_TM: Tensor, n_TM: Tensor, weight_1M: Tensor) -> Tensor:
    """Return y · sigmoid(n · weight), computed in float32: dense, in the dtype of y. The columns of a token must lie
    side by side in both."""
    gate_T1 = (n_TM.float() * weight_1M.float()).sum(1, keepdim=True)
    return (y_TM.float() * torch.sigmoid(gate_T1)).to(y_TM.dtype)


@dataclass(frozen=True)
class Case:
    """A case for tests and benchmarks."""

    tokens: int
    width: int

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return random inputs, whose gates have a standard deviation of 2 before the sigmoid."""
        generator = torch.Generator(device).manual_seed(seed)
        y_TM, n_TM, weight_1M = (
            torch.randn(shape, generator=generator, device=device)
            for shape in ((self.tokens, self.width), (self.tokens, self.width), (1, self.width))
        )
        return (3 * y_TM).to(dtype), n_TM.to(dtype), (2 * self.width**-0.5 * weight_1M).to(dtype)


CASES = (Case(1, 64), Case(7, 1400), Case(33, 2048))

TOKEN_GATE = Op(
    "token_gate",
    token_gate,
    (
        Implementation("triton", "ridgeline.kernels.token_gate.triton:token_gate", on_gpu),
        Implementation("torch", "ridgeline.kernels.token_gate.torch_ops:token_gate"),
    ),
)
