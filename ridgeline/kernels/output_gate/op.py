"""The gate behind attention, as wide as what was attended.

Legend:
    T  tokens
    X  columns of all query heads
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.op import Implementation, Op, on_gpu


def output_gate(x_TX: Tensor, gate_TX: Tensor) -> Tensor:
    """Return x · sigmoid(gate), computed in float32: dense, in the dtype of x. The columns of a token must lie side by
    side in both."""
    return (x_TX.float() * torch.sigmoid(gate_TX.float())).to(x_TX.dtype)


@dataclass(frozen=True)
class Case:
    """A case for tests and benchmarks. beside: columns of other projections beside those of the gate."""

    tokens: int
    width: int
    beside: int = 0

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return random inputs with a standard deviation of 3. The gate is a view of a fused projection."""
        generator = torch.Generator(device).manual_seed(seed)
        shape = self.tokens, 2 * self.width + self.beside
        both = (3 * torch.randn(shape, generator=generator, device=device)).to(dtype)
        return both[:, -self.width :].contiguous(), both[:, : self.width]


CASES = (Case(1, 64), Case(7, 352, 16), Case(33, 4096, 2048))

OUTPUT_GATE = Op(
    "output_gate",
    output_gate,
    (
        Implementation("triton", "ridgeline.kernels.output_gate.triton:output_gate", on_gpu),
        Implementation("torch", "ridgeline.kernels.output_gate.torch_ops:output_gate"),
    ),
)
