"""Feed-forward. Legend: T tokens, M model width, F intermediate width."""

from __future__ import annotations

from torch import Tensor, nn

from ridgeline.core.model_spec import MLPSpec
from ridgeline.layers.build import Build
from ridgeline.layers.linear import Linear


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up fused."""

    def __init__(self, spec: MLPSpec, width: int, build: Build) -> None:
        super().__init__()
        self.kind = spec.activation
        self.ops = build.ops
        self.gate_up = Linear(width, (spec.intermediate_size, spec.intermediate_size), spec.bias, build)
        self.down = Linear(spec.intermediate_size, (width,), spec.bias, build)

    def forward(self, x_TM: Tensor) -> Tensor:
        return self.down(self.ops.gated_activation(self.gate_up(x_TM), self.kind))


class MLP(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, spec: MLPSpec, width: int, build: Build) -> None:
        super().__init__()
        self.kind = spec.activation
        self.ops = build.ops
        self.up = Linear(width, (spec.intermediate_size,), spec.bias, build)
        self.down = Linear(spec.intermediate_size, (width,), spec.bias, build)

    def forward(self, x_TM: Tensor) -> Tensor:
        return self.down(self.ops.activation(self.up(x_TM), self.kind))


def feed_forward(spec: MLPSpec, width: int, build: Build) -> nn.Module:
    """The module for `spec`: [T, M] → [T, M]."""
    return (GatedMLP if spec.gated else MLP)(spec, width, build)
