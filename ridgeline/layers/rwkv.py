"""RWKV's mixers: over time, and over channels.

Legend:
    T  tokens of the step
    M  model width
    N  block ids
    X  channels
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline.core.specs.rwkv import ChannelMixSpec, TimeMixSpec
from ridgeline.kernels.scans.causal_conv.op import ConvInputs
from ridgeline.kernels.scans.causal_conv.transfer import transfer as shifted_by
from ridgeline.kernels.scans.metadata import ScanMetadata
from ridgeline.kernels.scans.wkv.op import WkvInputs
from ridgeline.kernels.scans.wkv.transfer import transfer as weighed_by
from ridgeline.layers.build import Build
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm, summed_norm
from ridgeline.layers.recurrent import DecayRate, Recurs


class Shift(nn.Module):
    """Mixtures of each token with the one before it, channel by channel.

    share: [mixtures, 1, M], how much of the token itself is in each.
    """

    def __init__(self, mixtures: int, width: int, build: Build) -> None:
        super().__init__()
        self.ops, self.parts = build.ops, (1,) * mixtures
        self.share = build.parameter(mixtures, 1, width)
        before = torch.tensor([1.0, 0.0], dtype=build.dtype, device=build.device)
        self.register_buffer("before", before.repeat(width, 1), persistent=False)  # dense, as the op takes weights

    def forward(self, x_TM: Tensor, last_N1M: Tensor, metadata: ScanMetadata) -> list[Tensor]:
        """Return the mixtures, [T, M] each, and leave each row's last token in `last_N1M`."""
        assert isinstance(self.before, Tensor)
        before_TM = metadata.run(self.ops.causal_conv, shifted_by, last_N1M, ConvInputs(x_TM, self.before, None, None))
        return [torch.lerp(before_TM, x_TM, share_1M) for share_1M in self.share]


class TimeMix(nn.Module):
    """The mixer of a `TimeMixSpec`."""

    def __init__(self, spec: TimeMixSpec, width: int, build: Build) -> None:
        super().__init__()
        self.ops, channels, self.pending = build.ops, spec.channels, build.pending
        self.shift = Shift(3, width, build)
        self.key = Linear(width, (channels,), False, build.within("key"))
        self.value = Linear(width, (channels,), False, build.within("value"))
        self.receptance = Linear(width, (channels,), False, build.within("receptance"))
        self.rate = DecayRate((channels,), build)
        self.bonus = build.parameter(channels, dtype=torch.float32)
        self.out = Linear(channels, (width,), False, build.within("out"), over=build.sums)

    def forward(
        self, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, positions_T: Tensor, state: Recurs
    ) -> tuple[Tensor, Tensor]:
        """Return (what the mixer adds to the residual, the residual before it): [T, M] each."""
        x_TM, residual_TM = summed_norm(self.pending, self.ops, norm, x_TM, residual_TM)
        last_N1M, states_N3X = state.parts
        of_key, of_value, of_receptance = self.shift(x_TM, last_N1M, state.metadata)
        given = WkvInputs(self.key(of_key), self.value(of_value), self.rate(), self.bonus)
        o_TX = state.metadata.run(self.ops.wkv, weighed_by, states_N3X, given)
        return self.out(torch.sigmoid(self.receptance(of_receptance)) * o_TX), residual_TM


class ChannelMix(nn.Module):
    """The mixer of a `ChannelMixSpec`."""

    def __init__(self, spec: ChannelMixSpec, width: int, build: Build) -> None:
        super().__init__()
        self.ops, self.pending = build.ops, build.pending
        self.shift = Shift(2, width, build)
        self.key = Linear(width, (spec.channels,), False, build.within("key"))
        self.receptance = Linear(width, (width,), False, build.within("receptance"))
        self.value = Linear(spec.channels, (width,), False, build.within("value"), over=build.sums)

    def forward(
        self, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, positions_T: Tensor, state: Recurs
    ) -> tuple[Tensor, Tensor]:
        """Return (what the mixer adds to the residual, the residual before it): [T, M] each."""
        x_TM, residual_TM = summed_norm(self.pending, self.ops, norm, x_TM, residual_TM)
        of_key, of_receptance = self.shift(x_TM, state.parts[0], state.metadata)
        y_TM = self.value(torch.relu(self.key(of_key)).square())
        return torch.sigmoid(self.receptance(of_receptance)) * y_TM, residual_TM
