"""Mixers with a gated delta rule.

Legend:
    T  tokens of the step
    M  model width
    H  query and key heads
    G  value heads
    K  width of a query or key
    V  width of a value
    X  2 H K + G V, columns of q, k and v
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline.core.specs.delta import GatedDeltaSpec
from ridgeline.kernels.scans.gated_delta.op import DeltaInputs
from ridgeline.kernels.scans.gated_delta.transfer import transfer
from ridgeline.layers.build import Build
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm
from ridgeline.layers.recurrent import CausalConv, Recurs


class GatedDelta(nn.Module):
    """The mixer of a `GatedDeltaSpec`, with one fused projection to q, k, v, z, b and a."""

    def __init__(self, spec: GatedDeltaSpec, width: int, build: Build) -> None:
        super().__init__()
        self.spec, self.ops = spec, build.ops
        self.delta_in = Linear(
            width, spec.projected, False, build.within("delta_in"), pending=build.pending, columns=spec.columns
        )
        self.conv = CausalConv(spec.columns[:3], spec.length, False, "silu", build)
        self.log_rate = build.parameter(spec.value_heads, dtype=torch.float32)
        self.dt_bias = build.parameter(spec.value_heads, dtype=torch.float32)
        self.norm = Norm(spec.norm, spec.value_dim, build)
        self.out = Linear(spec.value_size, (width,), False, build.within("out"), over=build.sums)

    def forward(
        self, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, positions_T: Tensor, state: Recurs
    ) -> tuple[Tensor, Tensor]:
        """Return (what the mixer adds to the residual, the residual before it): [T, M] each."""
        spec = self.spec
        tails_NwX, states_NGKV = state.parts
        y_TO, residual_TM = self.delta_in.normed(norm, x_TM, residual_TM)
        qkv_TX, z_TX, b_TG, a_TG = y_TO.split(
            (spec.channels, spec.value_size, spec.value_heads, spec.value_heads), dim=-1
        )
        qkv_TX = self.conv(qkv_TX, tails_NwX, state.metadata)
        q_TX, k_TX, v_TX = qkv_TX.split((spec.key_size, spec.key_size, spec.value_size), dim=-1)
        q_THK, k_THK = (x_TX.unflatten(-1, (spec.key_heads, -1)) for x_TX in (q_TX, k_TX))
        v_TGV = v_TX.unflatten(-1, (spec.value_heads, -1))
        given = DeltaInputs(q_THK, k_THK, v_TGV, a_TG, b_TG, self.log_rate, self.dt_bias, spec.key_dim**-0.5)
        o_TGV = state.metadata.run(self.ops.gated_delta, transfer, states_NGKV, given)
        z_TGV = z_TX.unflatten(-1, (spec.value_heads, -1))
        o_TGV = self.ops.gated_norm(o_TGV, z_TGV, self.norm.weight, self.norm.eps, spec.value_dim, True)
        return self.out(o_TGV.flatten(1)), residual_TM
