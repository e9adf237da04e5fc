"""Linear layers; several projections of one input may be fused. Legend: T tokens, I inputs, O outputs."""

from __future__ import annotations

from torch import Tensor, nn

from ridgeline.layers.build import Build


class Linear(nn.Module):
    """`parts`: rows of each fused projection, in order; the weight is [sum(parts), inputs]."""

    def __init__(self, inputs: int, parts: tuple[int, ...], bias: bool, build: Build) -> None:
        super().__init__()
        self.parts = parts
        self.ops = build.ops
        self.weight = build.parameter(sum(parts), inputs)
        self.bias = build.parameter(sum(parts)) if bias else None

    def forward(self, x_TI: Tensor) -> Tensor:
        """[T, O] in the dtype of `x_TI`."""
        return self.ops.linear(x_TI, self.weight, self.bias)
