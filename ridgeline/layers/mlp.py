"""Feed-forwards.

Legend:
    T  tokens of the step
    M  model width
    F  intermediate width
"""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline.core.specs.model import MLPSpec
from ridgeline.layers.build import Build
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm


class GatedMLP(nn.Module):
    """The feed-forward down(act(gate(x)) * up(x)), with gate and up fused."""

    def __init__(self, spec: MLPSpec, width: int, build: Build) -> None:
        super().__init__()
        self.kind, self.ops, self.tp = spec.activation, build.ops, build.mesh.tp
        self._edge = NormalDist().inv_cdf(spec.sparsity) if spec.sparsity else None
        size, (gated, output) = spec.intermediate_size, spec.multipliers
        self.gate_up = Linear(
            width, (size, size), spec.first_bias, build.within("gate_up"), pending=build.pending,
            multipliers=((size, gated), (size, 1.0)),
        )  # fmt: skip
        self.down = Linear(
            size, (width,), spec.bias, build.within("down"), over=build.sums, multipliers=((width, output),)
        )

    def forward(
        self, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, live_T: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self._edge is not None:
            gate_up_TF, residual_TM = self.gate_up.normed(norm, x_TM, residual_TM)
            return self.down(self._sparse(gate_up_TF, self._edge)), residual_TM
        y, residual_TM = self.gate_up.normed_for(self.down, norm, x_TM, residual_TM, gate=self.kind)
        return self.down(y), residual_TM

    def _sparse(self, gate_up_TF: Tensor, edge: float) -> Tensor:
        """Return act(max(gate - mean - deviation * edge, 0)) * up, with the mean and the deviation of the whole token's
        gates, of which every rank has a part."""
        gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
        mean_T1 = self.tp.all_reduce(gate_TF.float().mean(-1, keepdim=True)) / self.tp.size
        off_TF = gate_TF.float() - mean_T1
        variance_T1 = self.tp.all_reduce(off_TF.square().mean(-1, keepdim=True)) / self.tp.size
        gate_TF = F.relu(off_TF - edge * variance_T1.sqrt()).to(gate_up_TF.dtype)
        return self.ops.activation(gate_TF, self.kind) * up_TF


BETA, EPS = 0.5, -1e-6  # of xIELU, as its authors fixed them


def xielu(x_TF: Tensor, rise_1: Tensor, fall_1: Tensor) -> Tensor:
    """Return xIELU (Huang and Schlag, arXiv 2411.13010), computed in float32: a parabola above 0, whose curve is
    learned, and below it an exponential whose height is. In the dtype of x."""
    x = x_TF.float()
    rise, fall = F.softplus(rise_1.float()), BETA + F.softplus(fall_1.float())
    y = torch.where(x > 0, rise * x * x, (torch.expm1(x.clamp(max=EPS)) - x) * fall) + BETA * x
    return y.to(x_TF.dtype)


class MLP(nn.Module):
    """The feed-forward down(act(up(x)))."""

    rise: nn.Parameter | None
    fall: nn.Parameter | None

    def __init__(self, spec: MLPSpec, width: int, build: Build) -> None:
        super().__init__()
        self.kind = spec.activation
        self.ops = build.ops
        self.up = Linear(width, (spec.intermediate_size,), spec.bias, build.within("up"), pending=build.pending)
        self.down = Linear(spec.intermediate_size, (width,), spec.bias, build.within("down"), over=build.sums)
        learns = spec.activation == "xielu"
        self.rise, self.fall = (build.parameter(1) if learns else None for _ in range(2))

    def forward(
        self, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, live_T: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        y_TF, residual_TM = self.up.normed(norm, x_TM, residual_TM)
        if self.rise is not None and self.fall is not None:
            return self.down(xielu(y_TF, self.rise, self.fall)), residual_TM
        return self.down(self.ops.activation(y_TF, self.kind)), residual_TM


def feed_forward(spec: MLPSpec, width: int, build: Build) -> nn.Module:
    """Return the module for `spec`. It maps (norm, x, residual, live) to (what it adds to the residual, the residual
    before it)."""
    return (GatedMLP if spec.gated else MLP)(spec, width, build)
