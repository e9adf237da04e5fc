"""Linear attention as data: mixers whose state maps keys to values and decays, with and without a delta rule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ridgeline.core.specs.division import Ranks
from ridgeline.core.specs.model import NormSpec, Product, Products, RopeSpec
from ridgeline.core.specs.state import RecurrentSpec, StatePart


@dataclass(frozen=True, kw_only=True)
class LinearAttentionSpec:
    """The mixer out(norm(attend(q, k, v)) * silu(z)), where q, k, v and z are projections of the input, and the norm is
    each head's.

    heads: queries, keys and values have as many.
    key_dim, value_dim: the width of a key head and of a value head.
    norm: the norm of each value head.
    rank: the decays of gated linear attention (Yang et al., arXiv 2312.06635) are those of each token and channel,
        exp(log_sigmoid(y) / divisor), where y is made of the input through two projections with so many numbers between
        them. 0: those of retention (Sun et al., arXiv 2307.08621), which are each head's: 1 - 2^(-5 - head).
    divisor: of the decays' logarithms.
    rope: the rotation of queries and keys.
    """

    kind: ClassVar[str] = "linear_attention"
    summed: ClassVar[tuple[()]] = ()
    heads: int
    key_dim: int
    value_dim: int
    norm: NormSpec
    rank: int = 0
    divisor: float = 16.0
    rope: RopeSpec | None = None

    @property
    def states(self) -> tuple[RecurrentSpec]:
        return (RecurrentSpec(parts=(StatePart((self.heads, self.key_dim, self.value_dim)),)),)

    @property
    def norms(self) -> tuple[tuple[NormSpec, int]]:
        return ((self.norm, self.value_dim),)

    @property
    def vectors(self) -> int:
        return 0

    @property
    def scratch(self) -> int:
        return sum(self.projected) + (3 * self.key_size if self.rank else 0) + 2 * self.value_size

    def products(self, width: int) -> Products:
        found = {"linear_in": Product(width, sum(self.projected))}
        if self.rank:
            found["decay"] = Product(self.rank, self.key_size, True)
        return found | {"out": Product(self.value_size, width)}

    def part(self, ranks: Ranks) -> LinearAttentionSpec:
        return replace(self, heads=ranks.part("heads of linear attention", self.heads))

    @property
    def projected(self) -> tuple[int, ...]:
        """The widths of the parts of the fused projection: q, k, v, z, and what decays are made of."""
        parts = (self.key_size, self.key_size, self.value_size, self.value_size)
        return (*parts, self.rank) if self.rank else parts

    @property
    def key_size(self) -> int:
        return self.heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.heads * self.value_dim


@dataclass(frozen=True, kw_only=True)
class LightningAttentionSpec:
    """The mixer out(norm(attend(silu(q), silu(k), silu(v))) * sigmoid(z)) of MiniMax-01 (arXiv 2501.08313), where q, k,
    v and z are projections of the input, and the norm is that of all heads together. With every token a head's state
    decays by exp(-slope · share). The slopes are 2^(-8/heads), its square, and so on.

    heads: queries, keys and values have as many, each `head_dim` wide.
    share: of the slopes, in this layer.
    """

    kind: ClassVar[str] = "lightning_attention"
    rope: ClassVar[None] = None
    vectors: ClassVar[int] = 0
    heads: int
    head_dim: int
    share: float
    norm: NormSpec

    @property
    def states(self) -> tuple[RecurrentSpec]:
        return (RecurrentSpec(parts=(StatePart((self.heads, self.head_dim, self.head_dim)),)),)

    @property
    def norms(self) -> tuple[tuple[NormSpec, int]]:
        return ((self.norm, self.size),)

    @property
    def scratch(self) -> int:
        return sum(self.projected) + 5 * self.size

    @property
    def summed(self) -> tuple[int]:
        return (1,)

    def products(self, width: int) -> Products:
        return {"linear_in": Product(width, sum(self.projected)), "out": Product(self.size, width)}

    def part(self, ranks: Ranks) -> LightningAttentionSpec:
        return replace(self, heads=ranks.part("heads of lightning attention", self.heads))

    @property
    def projected(self) -> tuple[int, ...]:
        """The widths of the parts of the fused projection, as files have them: q, k and v, and z."""
        return 3 * self.size, self.size

    @property
    def columns(self) -> tuple[int, ...]:
        """The widths of q, k, v and z."""
        return (self.size,) * 4

    @property
    def size(self) -> int:
        """The columns of q, and of k, v and z."""
        return self.heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class DeltaAttentionSpec:
    """The mixer out(norm(delta(silu(conv(q, k, v)), a, b)) * sigmoid(z)) of Kimi Linear (arXiv 2510.26692): a delta
    rule whose state decays channel by channel. q, k, v and b are projections of the input. a, of which the decays are
    made, and z are made of it through two projections each. Every channel of q, k and v is convolved by itself with its
    last inputs.

    heads: queries, keys and values have as many, each `head_dim` wide.
    length: so many inputs make an output of the convolution, the newest one included.
    rank: the numbers between the two projections.
    norm: the norm of each value head.
    """

    kind: ClassVar[str] = "delta_attention"
    summed: ClassVar[tuple[()]] = ()
    rope: ClassVar[None] = None
    heads: int
    head_dim: int
    length: int
    rank: int
    norm: NormSpec

    @property
    def states(self) -> tuple[RecurrentSpec]:
        tail = StatePart((self.length - 1, 3 * self.size), None)
        return (RecurrentSpec(parts=(tail, StatePart((self.heads, self.head_dim, self.head_dim)))),)

    @property
    def norms(self) -> tuple[tuple[NormSpec, int]]:
        return ((self.norm, self.head_dim),)

    @property
    def vectors(self) -> int:
        return 3 * self.size * self.length + self.heads + self.size

    @property
    def scratch(self) -> int:
        return sum(self.projected) + 7 * self.size

    def products(self, width: int) -> Products:
        return {
            "delta_in": Product(width, sum(self.projected)),
            "decay": Product(self.rank, self.size),
            "gate": Product(self.rank, self.size),
            "out": Product(self.size, width),
        }

    def part(self, ranks: Ranks) -> DeltaAttentionSpec:
        return replace(self, heads=ranks.part("heads of delta attention", self.heads))

    @property
    def projected(self) -> tuple[int, ...]:
        """The widths of the parts of the fused projection: q, k, v, what a and z are made of, and b."""
        return self.size, self.size, self.size, self.rank, self.rank, self.heads

    @property
    def size(self) -> int:
        """The columns of q, and of k and v."""
        return self.heads * self.head_dim
