"""Mixers of Mamba-2.

Legend:
    T  tokens of the step
    M  model width
    H  heads
    P  head width
    G  groups of heads
    S  state width
    X  columns of the projection, and those of its parts
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline.core.specs.mamba import Mamba2Spec
from ridgeline.kernels.scans.ssd.op import SsdInputs
from ridgeline.kernels.scans.ssd.transfer import transfer
from ridgeline.layers.build import Build
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm
from ridgeline.layers.recurrent import CausalConv, DecayRate, Recurs


class Mamba2Behind(nn.Module):
    """The mixer of a `Mamba2Spec` behind its fused projection to z, x, b, c and dt.

    multiplier: that of its output. projection: its own, if it has one, so that it comes first.
    """

    def __init__(
        self, spec: Mamba2Spec, width: int, build: Build, multiplier: float = 1.0, projection: Linear | None = None
    ) -> None:
        super().__init__()
        if projection is not None:
            self.mamba_in = projection
        self.spec, self.ops, self.tp = spec, build.ops, build.mesh.tp
        self.conv = CausalConv(spec.columns[1:4], spec.length, spec.conv_bias, "silu", build)
        self.rate = DecayRate((spec.heads,), build)
        self.dt_bias = build.parameter(spec.heads, dtype=torch.float32)
        self.skip = build.parameter(spec.heads, dtype=torch.float32)
        self.norm = None if spec.norm is None else Norm(spec.norm, spec.inner, build)
        self.out = Linear(
            spec.inner, (width,), spec.out_bias, build.within("out"), over=build.sums,
            multipliers=((width, multiplier),),
        )  # fmt: skip

    def mixed(self, zxbcdt_TX: Tensor, state: Recurs) -> Tensor:
        """Return the mixer's output for its projection: [T, M]."""
        spec, shared = self.spec, self.spec.groups * self.spec.state_width
        tails_NwX, states_NHPS = state.parts
        z_TX, xbc_TX, dt_TH = zxbcdt_TX.split((spec.inner, spec.channels, spec.heads), dim=-1)
        xbc_TX = self.conv(xbc_TX, tails_NwX, state.metadata)
        x_TX, b_TX, c_TX = xbc_TX.split((spec.inner, shared, shared), dim=-1)
        x_THP = x_TX.unflatten(-1, (spec.heads, -1))
        b_TGS, c_TGS = (each_TX.unflatten(-1, (spec.groups, -1)) for each_TX in (b_TX, c_TX))
        bounds = spec.dt_min, spec.dt_max
        given = SsdInputs(x_THP, dt_TH, self.rate(), b_TGS, c_TGS, self.skip, self.dt_bias, *bounds)
        y_THP = state.metadata.run(self.ops.ssd, transfer, states_NHPS, given)
        return self.out(self._gated(y_THP.flatten(1), z_TX))

    def _gated(self, y_TX: Tensor, z_TX: Tensor) -> Tensor:
        if self.norm is None:
            return y_TX * F.silu(z_TX)
        group, before = self.spec.inner // self.spec.groups, self.spec.norm_before_gate
        if self.spec.norm_ranks > 1:
            gate_TX = F.silu(z_TX.float())
            n_TX = self.norm.over(y_TX.float() * (1 if before else gate_TX), self.tp, self.spec.norm_ranks)
            return (n_TX * gate_TX if before else n_TX).to(y_TX.dtype)
        return self.ops.gated_norm(y_TX, z_TX, self.norm.weight, self.norm.eps, group, before)


class Mamba2(Mamba2Behind):
    """The mixer of a `Mamba2Spec`."""

    def __init__(self, spec: Mamba2Spec, width: int, build: Build) -> None:
        inner = build.within("mamba_in")
        projection = Linear(width, (spec.projected,), spec.bias, inner, pending=build.pending, columns=spec.columns)
        super().__init__(spec, width, build, projection=projection)

    def forward(
        self, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, positions_T: Tensor, state: Recurs
    ) -> tuple[Tensor, Tensor]:
        """Return (what the mixer adds to the residual, the residual before it): [T, M] each."""
        zxbcdt_TX, residual_TM = self.mamba_in.normed(norm, x_TM, residual_TM)
        return self.mixed(zxbcdt_TX, state), residual_TM
