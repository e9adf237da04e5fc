"""The parts of a conformer as data (Gulati et al., arXiv 2005.08100): layers that hear near sounds by convolutions and
by attention. Its feed-forwards are those of other layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from ridgeline.core.specs.division import Ranks
from ridgeline.core.specs.model import NormSpec, Product, Products


@dataclass(frozen=True, kw_only=True)
class GluConvSpec:
    """The mixer out(silu(norm(conv(a * act(b))))). a and b are projections of the input, and every channel is convolved
    by itself with its last inputs.

    channels: of a and b each.
    length: so many inputs make an output, the newest one included.
    gate: act.
    norm: None: there is none.
    pointwise: a linear map of all channels follows the convolution.
    shifted: a and b have biases of their own besides those of their projection.
    bias: the convolution and all maps have biases.
    """

    kind: ClassVar[str] = "glu_conv"
    summed: ClassVar[tuple[()]] = ()
    rope: ClassVar[None] = None
    states: ClassVar[tuple[()]] = ()
    channels: int
    length: int
    gate: Literal["sigmoid", "silu"] = "sigmoid"
    norm: NormSpec | None = None
    pointwise: bool = False
    shifted: bool = False
    bias: bool = False

    @property
    def norms(self) -> tuple[tuple[NormSpec, int], ...]:
        return () if self.norm is None else ((self.norm, self.channels),)

    @property
    def vectors(self) -> int:
        return self.channels * (self.length + self.bias + 2 * self.shifted)

    @property
    def scratch(self) -> int:
        return 6 * self.channels

    def products(self, width: int) -> Products:
        found = {"glu_in": Product(width, 2 * self.channels, self.bias)}
        if self.pointwise:
            found["pointwise"] = Product(self.channels, self.channels, self.bias)
        return found | {"out": Product(self.channels, width, self.bias)}

    def part(self, ranks: Ranks) -> GluConvSpec:
        return replace(self, channels=ranks.part("channels of convolutions", self.channels))


@dataclass(frozen=True, kw_only=True)
class NearAttentionSpec:
    """Attention to the last `window` places, the own one included, whose scores have a product of the query with a
    vector of the distance too (Dai et al., arXiv 1901.02860). Scores x become softcap · tanh(x / softcap).

    key_scale: multiplies keys, and not the vectors of distances.
    """

    kind: ClassVar[str] = "near_attention"
    summed: ClassVar[tuple[()]] = ()
    rope: ClassVar[None] = None
    states: ClassVar[tuple[()]] = ()
    norms: ClassVar[tuple[()]] = ()
    num_heads: int
    head_dim: int
    window: int
    softcap: float
    key_scale: float = 1.0

    @property
    def vectors(self) -> int:
        return self.head_dim

    @property
    def scratch(self) -> int:
        return 20 * self.num_heads * self.head_dim  # in float32, with each block's keys and values

    def products(self, width: int) -> Products:
        size = self.num_heads * self.head_dim
        return {
            "qkv": Product(width, 3 * size),
            "distances": Product(width, size, used=0),
            "out": Product(size, width),
        }

    def part(self, ranks: Ranks) -> NearAttentionSpec:
        return replace(self, num_heads=ranks.part("attention heads", self.num_heads))
