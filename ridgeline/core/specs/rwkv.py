"""RWKV's two mixers as data (Peng et al., arXiv 2305.13048). Both see each token mixed with the one before it, so both
keep a state, and a block of the network is two layers without feed-forwards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ridgeline.core.specs.division import Ranks
from ridgeline.core.specs.model import Product, Products
from ridgeline.core.specs.state import RecurrentSpec, StatePart


@dataclass(frozen=True, kw_only=True)
class TimeMixSpec:
    """The mixer out(sigmoid(r) * mean(k, v)): k, v and r are projections of three mixtures of the input with the one
    before it, and the mean is that of `kernels.scans.wkv`.

    width: of the model. channels: of k, v and r.
    """

    kind: ClassVar[str] = "time_mix"
    summed: ClassVar[tuple[()]] = ()
    rope: ClassVar[None] = None
    norms: ClassVar[tuple[()]] = ()
    width: int
    channels: int

    @property
    def states(self) -> tuple[RecurrentSpec]:
        return (RecurrentSpec(parts=(StatePart((1, self.width), None), StatePart((3, self.channels)))),)

    @property
    def vectors(self) -> int:
        return 3 * self.width + 2 * self.channels

    @property
    def scratch(self) -> int:
        return 5 * self.width + 5 * self.channels

    def products(self, width: int) -> Products:
        each = Product(width, self.channels)
        return {"key": each, "value": each, "receptance": each, "out": Product(self.channels, width)}

    def part(self, ranks: Ranks) -> TimeMixSpec:
        return replace(self, channels=ranks.part("channels of RWKV", self.channels))


@dataclass(frozen=True, kw_only=True)
class ChannelMixSpec:
    """The mixer sigmoid(r) * value(relu(k)²): k and r are projections of two mixtures of the input with the one before
    it.

    width: of the model. channels: of k.
    """

    kind: ClassVar[str] = "channel_mix"
    summed: ClassVar[tuple[()]] = ()
    rope: ClassVar[None] = None
    norms: ClassVar[tuple[()]] = ()
    width: int
    channels: int

    @property
    def states(self) -> tuple[RecurrentSpec]:
        return (RecurrentSpec(parts=(StatePart((1, self.width), None),)),)

    @property
    def vectors(self) -> int:
        return 2 * self.width

    @property
    def scratch(self) -> int:
        return 6 * self.width + 2 * self.channels

    def products(self, width: int) -> Products:
        return {
            "key": Product(width, self.channels),
            "receptance": Product(width, width),
            "value": Product(self.channels, width),
        }

    def part(self, ranks: Ranks) -> ChannelMixSpec:
        return replace(self, channels=ranks.part("channels of RWKV", self.channels))
