"""The parts that mixers with a state of constant size share.

Legend:
    N  block ids
    T  tokens of the step
    X  channels
    W  inputs that make an output
    w  W - 1, the inputs that are kept
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from ridgeline.kernels.scans.causal_conv.op import ConvInputs
from ridgeline.kernels.scans.causal_conv.transfer import transfer
from ridgeline.kernels.scans.metadata import ScanMetadata
from ridgeline.layers.build import Build


class Recurs(Protocol):
    """The state of one recurrent layer.

    parts: its tensors, [N, …] each, which ops change in place.
    metadata: the blocks that the step's rows read and write.
    """

    @property
    def parts(self) -> tuple[Tensor, ...]: ...

    @property
    def metadata(self) -> ScanMetadata: ...


class CausalConv(nn.Module):
    """A convolution of every channel by itself, over its last W inputs. The weight is [X, 1, W], as torch has it.

    columns: the channels, by what they belong to: ranks divide each of these by itself.
    parts: the same, for files that hold each of them in a tensor of its own.
    """

    def __init__(
        self, columns: tuple[int, ...], length: int, bias: bool, activation: Literal["silu"] | None, build: Build
    ) -> None:
        super().__init__()
        self.ops, self.activation = build.ops, activation
        self.columns = self.parts = columns
        channels = sum(columns)
        self.weight = build.parameter(channels, 1, length)
        self.bias = build.parameter(channels) if bias else None

    def forward(self, x_TX: Tensor, tails_NwX: Tensor, metadata: ScanMetadata) -> Tensor:
        """Return [T, X], and leave each row's last inputs in `tails_NwX`."""
        given = ConvInputs(x_TX, self.weight.squeeze(1), self.bias, self.activation)
        return metadata.run(self.ops.causal_conv, transfer, tails_NwX, given)


class DecayRate(nn.Module):
    """The rates at which states are forgotten, -exp(log), float32."""

    rate: Tensor | None

    def __init__(self, shape: tuple[int, ...], build: Build) -> None:
        super().__init__()
        self.log = build.parameter(*shape, dtype=torch.float32)
        self.register_buffer("rate", None, persistent=False)

    def prepare(self) -> None:
        """Compute the rates once. The logarithms can then not be trained."""
        self.rate = -self.log.detach().exp()

    def forward(self) -> Tensor:
        """Return the rates."""
        return -self.log.exp() if self.rate is None else self.rate
