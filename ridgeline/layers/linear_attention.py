"""Mixers of linear attention: gated, with retention, with constant decays, and with a delta rule.

Legend:
    T  tokens of the step
    M  model width
    H  heads
    K  width of a query or key
    V  width of a value
    X  columns of several heads
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline.core.specs.linear import DeltaAttentionSpec, LightningAttentionSpec, LinearAttentionSpec
from ridgeline.kernels.scans.gated_delta.op import DeltaInputs
from ridgeline.kernels.scans.gated_delta.transfer import transfer as moved_by
from ridgeline.kernels.scans.linear_attention.op import LinearInputs
from ridgeline.kernels.scans.linear_attention.transfer import transfer as decayed_by
from ridgeline.layers.build import Build
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm
from ridgeline.layers.recurrent import CausalConv, Recurs


class LinearAttention(nn.Module):
    """The mixer of a `LinearAttentionSpec`, with one fused projection to q, k, v, z and what decays are made of.
    Differentiable."""

    decay_H: Tensor

    def __init__(self, spec: LinearAttentionSpec, width: int, build: Build) -> None:
        super().__init__()
        self.spec, self.ops = spec, build.ops
        self.linear_in = Linear(width, spec.projected, False, build.within("linear_in"), pending=build.pending)
        self.decay = Linear(spec.rank, (spec.key_size,), True, build.within("decay")) if spec.rank else None
        if not spec.rank:
            first = spec.heads * build.mesh.tp.rank
            kept = [math.log1p(-(2.0 ** -(5 + head))) for head in range(first, first + spec.heads)]
            self.register_buffer("decay_H", torch.tensor(kept, device=build.device), persistent=False)
        self.rotary = build.rotary(spec.rope) if spec.rope else None
        self.norm = Norm(spec.norm, spec.value_dim, build)
        self.out = Linear(spec.value_size, (width,), False, build.within("out"), over=build.sums)

    def forward(
        self, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, positions_T: Tensor, state: Recurs
    ) -> tuple[Tensor, Tensor]:
        """Return (what the mixer adds to the residual, the residual before it): [T, M] each."""
        spec = self.spec
        y_TX, residual_TM = self.linear_in.normed(norm, x_TM, residual_TM)
        q_TX, k_TX, v_TX, z_TX, *low = y_TX.split(spec.projected, dim=-1)
        q_THK, k_THK, v_THV, z_THV = (x.unflatten(-1, (spec.heads, -1)) for x in (q_TX, k_TX, v_TX, z_TX))
        if self.rotary is not None:
            q_THK, k_THK = self.ops.rope(q_THK, k_THK, self.rotary.cos_sin_ZY, positions_T)
        decay = self.decay_H if self.decay is None else self._decay(self.decay(low[0]))
        given = LinearInputs(q_THK, k_THK, v_THV, decay, spec.key_dim**-0.5)
        o_THV = state.metadata.run(self.ops.linear_attention, decayed_by, state.parts[0], given)
        o_THV = self.ops.gated_norm(o_THV, z_THV, self.norm.weight, self.norm.eps, spec.value_dim, True)
        return self.out(o_THV.flatten(1)), residual_TM

    def _decay(self, y_TX: Tensor) -> Tensor:
        """Return the logarithms of the decays, float32 [T, H, K]."""
        return (F.logsigmoid(y_TX.float()) / self.spec.divisor).unflatten(-1, (self.spec.heads, -1))


class LightningAttention(nn.Module):
    """The mixer of a `LightningAttentionSpec`, with one fused projection to q, k, v and z."""

    decay_H: Tensor

    def __init__(self, spec: LightningAttentionSpec, width: int, build: Build) -> None:
        super().__init__()
        self.spec, self.ops, self.tp = spec, build.ops, build.mesh.tp
        self.linear_in = Linear(
            width, spec.projected, False, build.within("linear_in"), pending=build.pending, columns=spec.columns
        )
        first, all_heads = spec.heads * self.tp.rank, spec.heads * self.tp.size
        slopes = [2.0 ** (-8 * (head + 1) / all_heads) for head in range(first, first + spec.heads)]
        decay_H = torch.tensor([-spec.share * slope for slope in slopes], device=build.device)
        self.register_buffer("decay_H", decay_H, persistent=False)
        self.norm = Norm(spec.norm, spec.size, build)
        self.out = Linear(spec.size, (width,), False, build.within("out"), over=build.sums)

    def forward(
        self, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, positions_T: Tensor, state: Recurs
    ) -> tuple[Tensor, Tensor]:
        """Return (what the mixer adds to the residual, the residual before it): [T, M] each."""
        spec = self.spec
        y_TX, residual_TM = self.linear_in.normed(norm, x_TM, residual_TM)
        qkv_TX, z_TX = y_TX.split(spec.projected, dim=-1)
        qkv_TX = self.ops.activation(qkv_TX.contiguous(), "silu")
        q_THK, k_THK, v_THV = (x_TX.unflatten(-1, (spec.heads, -1)) for x_TX in qkv_TX.split(spec.size, dim=-1))
        given = LinearInputs(q_THK, k_THK, v_THV, self.decay_H, 1.0)
        o_THV = state.metadata.run(self.ops.linear_attention, decayed_by, state.parts[0], given)
        return self.out(self.ops.output_gate(self.norm.over(o_THV.flatten(1), self.tp), z_TX)), residual_TM


class DeltaAttention(nn.Module):
    """The mixer of a `DeltaAttentionSpec`, with one fused projection to q, k, v, what a and z are made of, and b."""

    def __init__(self, spec: DeltaAttentionSpec, width: int, build: Build) -> None:
        super().__init__()
        self.spec, self.ops = spec, build.ops
        self.delta_in = Linear(width, spec.projected, False, build.within("delta_in"), pending=build.pending)
        self.conv = CausalConv((spec.size,) * 3, spec.length, False, "silu", build)
        self.decay = Linear(spec.rank, (spec.size,), False, build.within("decay"))
        self.gate = Linear(spec.rank, (spec.size,), False, build.within("gate"))
        self.log_rate = build.parameter(1, 1, spec.heads, 1, dtype=torch.float32)  # the shape that files have
        self.dt_bias = build.parameter(spec.size, dtype=torch.float32)
        self.norm = Norm(spec.norm, spec.head_dim, build)
        self.out = Linear(spec.size, (width,), False, build.within("out"), over=build.sums)

    def forward(
        self, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, positions_T: Tensor, state: Recurs
    ) -> tuple[Tensor, Tensor]:
        """Return (what the mixer adds to the residual, the residual before it): [T, M] each."""
        spec, (tails_NwX, states_NHKV) = self.spec, state.parts
        y_TX, residual_TM = self.delta_in.normed(norm, x_TM, residual_TM)
        qkv_TX, of_a, of_z, b_TH = y_TX.split((3 * spec.size, spec.rank, spec.rank, spec.heads), dim=-1)
        qkv_TX = self.conv(qkv_TX, tails_NwX, state.metadata)
        q_THK, k_THK, v_THV, a_THK, z_THV = (
            x_TX.unflatten(-1, (spec.heads, -1))
            for x_TX in (*qkv_TX.split(spec.size, dim=-1), self.decay(of_a), self.gate(of_z))
        )
        gates = a_THK, b_TH, self.log_rate.flatten(), self.dt_bias.unflatten(0, (spec.heads, -1))
        given = DeltaInputs(q_THK, k_THK, v_THV, *gates, spec.head_dim**-0.5)
        o_THV = state.metadata.run(self.ops.delta_attention, moved_by, states_NHKV, given)
        o_THV = self.ops.gated_norm(o_THV, z_THV, self.norm.weight, self.norm.eps, spec.head_dim, True, "sigmoid")
        return self.out(o_THV.flatten(1)), residual_TM
