"""Short convolutions with gates before and behind them.

Legend:
    T  tokens of the step
    M  model width
    X  channels
    W  inputs that make an output
"""

from __future__ import annotations

from torch import Tensor, nn

from ridgeline.core.specs.conv import ShortConvSpec
from ridgeline.layers.build import Build
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm
from ridgeline.layers.recurrent import CausalConv, Recurs


class ShortConv(nn.Module):
    """The mixer out(c * conv(b * x)), with b, c and x fused."""

    def __init__(self, spec: ShortConvSpec, width: int, build: Build) -> None:
        super().__init__()
        channels = spec.channels
        self.conv_in = Linear(width, (channels,) * 3, spec.bias, build.within("conv_in"), pending=build.pending)
        self.conv = CausalConv((channels,), spec.length, spec.bias, None, build)
        self.out = Linear(channels, (width,), spec.bias, build.within("out"), over=build.sums)

    def forward(
        self, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, positions_T: Tensor, state: Recurs
    ) -> tuple[Tensor, Tensor]:
        """Return (what the convolution adds to the residual, the residual before it): [T, M] each."""
        bcx_TX, residual_TM = self.conv_in.normed(norm, x_TM, residual_TM)
        b_TX, c_TX, x_TX = bcx_TX.split(self.conv_in.parts, dim=-1)
        y_TX = self.conv(b_TX * x_TX, state.parts[0], state.metadata)
        return self.out(c_TX * y_TX), residual_TM
