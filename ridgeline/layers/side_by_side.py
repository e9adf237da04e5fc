"""Attention and Mamba-2 in one layer.

Legend:
    T  tokens of the step
    M  model width
    X  columns of the fused projection
"""

from __future__ import annotations

from torch import Tensor, nn

from ridgeline.core.specs.side import SideBySideSpec
from ridgeline.layers.attention import Attends, AttentionBehind
from ridgeline.layers.build import Build
from ridgeline.layers.linear import Linear
from ridgeline.layers.mamba2 import Mamba2Behind
from ridgeline.layers.norm import Norm
from ridgeline.layers.recurrent import Recurs


class SideBySide(nn.Module):
    """The mixer of a `SideBySideSpec`, with one projection for both."""

    def __init__(self, spec: SideBySideSpec, width: int, build: Build) -> None:
        super().__init__()
        self._both = sum(spec.attention.projected), spec.mamba.projected
        self.both_in = Linear(
            width, spec.projected, spec.attention.qkv_bias, build.within("both_in"), pending=build.pending,
            multipliers=tuple(zip(spec.columns, spec.multipliers, strict=True)), columns=spec.columns,
        )  # fmt: skip
        of_attention, of_mamba = spec.out_multipliers
        self.attention = AttentionBehind(spec.attention, width, build.within("attention"), of_attention)
        self.mamba = Mamba2Behind(spec.mamba, width, build.within("mamba"), of_mamba)

    def forward(
        self,
        norm: Norm | None,
        x_TM: Tensor,
        residual_TM: Tensor | None,
        positions_T: Tensor,
        state: tuple[Attends, Recurs],
    ) -> tuple[Tensor, Tensor]:
        """Return (what both mixers add to the residual, the residual before them): [T, M] each."""
        cached, kept = state
        both_TX, residual_TM = self.both_in.normed(norm, x_TM, residual_TM)
        qkv_TX, zxbcdt_TX = both_TX.split(self._both, dim=-1)
        return self.attention.mixed(qkv_TX, positions_T, cached) + self.mamba.mixed(zxbcdt_TX, kept), residual_TM
