"""A short convolution as data: a mixer that sees the last few tokens only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ridgeline.core.specs.division import Ranks
from ridgeline.core.specs.model import Product, Products
from ridgeline.core.specs.state import RecurrentSpec, StatePart


@dataclass(frozen=True, kw_only=True)
class ShortConvSpec:
    """A gated convolution: out(c * conv(b * x)), where b, c and x are projections of the input, and every channel is
    convolved by itself with its last inputs (LFM2, arXiv 2511.23404).

    channels: of b, c and x each.
    length: so many inputs make an output, the newest one included.
    bias: both projections and the convolution have biases.
    """

    kind: ClassVar[str] = "short_conv"
    summed: ClassVar[tuple[()]] = ()
    rope: ClassVar[None] = None
    norms: ClassVar[tuple[()]] = ()
    channels: int
    length: int
    bias: bool = False

    @property
    def states(self) -> tuple[RecurrentSpec]:
        return (RecurrentSpec(parts=(StatePart((self.length - 1, self.channels), None),)),)

    @property
    def vectors(self) -> int:
        return self.channels * (self.length + self.bias)

    @property
    def scratch(self) -> int:
        return 6 * self.channels

    def products(self, width: int) -> Products:
        return {
            "conv_in": Product(width, 3 * self.channels, self.bias),
            "out": Product(self.channels, width, self.bias),
        }

    def part(self, ranks: Ranks) -> ShortConvSpec:
        return replace(self, channels=ranks.part("channels of convolutions", self.channels))
