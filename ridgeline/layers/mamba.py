"""Mixers of Mamba.

Legend:
    T  tokens of the step
    M  model width
    X  channels
    S  numbers of a channel's state
    I  columns of r, b and c
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline.core.specs.mamba import MambaSpec
from ridgeline.kernels.scans.selective_scan.op import ScanInputs
from ridgeline.kernels.scans.selective_scan.transfer import transfer
from ridgeline.layers.build import Build
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm
from ridgeline.layers.recurrent import CausalConv, DecayRate, Recurs


class Mamba(nn.Module):
    """The mixer of a `MambaSpec`, with x and z fused, and r, b and c."""

    def __init__(self, spec: MambaSpec, width: int, build: Build) -> None:
        super().__init__()
        channels = spec.channels
        self.spec, self.ops = spec, build.ops
        self.mamba_in = Linear(width, (channels, channels), spec.bias, build.within("mamba_in"), pending=build.pending)
        self.conv = CausalConv((channels,), spec.length, spec.conv_bias, "silu", build)
        self.select = Linear(channels, spec.selected, False, build.within("select"), over=build.mesh.tp)
        self.dt_norm, self.b_norm, self.c_norm = (
            None if spec.norm is None else Norm(spec.norm, each, build, weighted=spec.norm_weights)
            for each in spec.selected
        )
        self.dt = Linear(spec.rank, (channels,), False, build.within("dt"))
        self.dt_bias = build.parameter(channels, dtype=torch.float32)
        self.rate = DecayRate((channels, spec.state_width), build)
        self.skip = build.parameter(channels, dtype=torch.float32)
        self.out = Linear(channels, (width,), spec.bias, build.within("out"), over=build.sums)

    def forward(
        self, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, positions_T: Tensor, state: Recurs
    ) -> tuple[Tensor, Tensor]:
        """Return (what the mixer adds to the residual, the residual before it): [T, M] each."""
        tails_NwX, states_NXS = state.parts
        xz_TX, residual_TM = self.mamba_in.normed(norm, x_TM, residual_TM)
        x_TX, z_TX = xz_TX.split(self.mamba_in.parts, dim=-1)
        x_TX = self.conv(x_TX, tails_NwX, state.metadata)
        r_TI, b_TS, c_TS = self.select(x_TX).split(self.spec.selected, dim=-1)
        if self.dt_norm is not None and self.b_norm is not None and self.c_norm is not None:
            r_TI, b_TS, c_TS = self.dt_norm(r_TI)[0], self.b_norm(b_TS)[0], self.c_norm(c_TS)[0]
        given = ScanInputs(x_TX, self.dt(r_TI), self.rate(), b_TS, c_TS, self.skip, self.dt_bias, z_TX)
        y_TX = state.metadata.run(self.ops.selective_scan, transfer, states_NXS, given)
        return self.out(y_TX), residual_TM
