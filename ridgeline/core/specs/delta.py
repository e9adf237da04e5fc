"""A gated delta rule as data: a mixer whose state maps keys to values and corrects itself at every token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ridgeline.core.specs.division import Ranks
from ridgeline.core.specs.model import NormSpec, Product, Products
from ridgeline.core.specs.state import RecurrentSpec, StatePart

CHUNK = 64  # tokens; a chunk has two products of its tokens with one another for each value head


@dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec:
    """The mixer out(norm(delta(silu(conv(q, k, v)), a, b)) * silu(z)) (Yang, Kautz and Hatamizadeh, arXiv 2412.06464).
    q, k, v, z, b and a are projections of the input. Every channel of q, k and v is convolved with its own last inputs.

    key_heads: query heads and key heads, as many of each.
    value_heads: value heads, each of which has a decay (a) and a step size (b) of its own. They are a multiple.
    key_dim, value_dim: the width of a key head and of a value head.
    length: so many inputs make an output of the convolution, the newest one included.
    norm: the norm of each value head.
    packed: checkpoints hold the projections in two tensors (q, k, v and z; b and a) and otherwise in four.
    """

    kind: ClassVar[str] = "gated_delta"
    summed: ClassVar[tuple[()]] = ()
    rope: ClassVar[None] = None
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    length: int
    norm: NormSpec
    packed: bool = False

    @property
    def states(self) -> tuple[RecurrentSpec]:
        tail = StatePart((self.length - 1, self.channels), None)
        return (RecurrentSpec(parts=(tail, StatePart((self.value_heads, self.key_dim, self.value_dim)))),)

    @property
    def norms(self) -> tuple[tuple[NormSpec, int]]:
        return ((self.norm, self.value_dim),)

    @property
    def vectors(self) -> int:
        return self.channels * self.length + 2 * self.value_heads

    @property
    def scratch(self) -> int:
        within = (2 * CHUNK + 8) * self.value_heads
        return sum(self.projected) + self.channels + 2 * self.value_size + within

    def products(self, width: int) -> Products:
        return {
            "delta_in": Product(width, sum(self.projected)),
            "out": Product(self.value_size, width),
        }

    def part(self, ranks: Ranks) -> GatedDeltaSpec:
        value_heads = ranks.part("value heads of delta rules", self.value_heads)
        key_heads = ranks.part_or_copy("key heads of delta rules", self.key_heads)
        return replace(self, key_heads=key_heads, value_heads=value_heads)

    @property
    def projected(self) -> tuple[int, ...]:
        """The widths of the parts of the fused projection: q, k, v, z, b and a, some of which lie in one tensor."""
        if self.packed:
            return self.channels + self.value_size, 2 * self.value_heads
        return self.channels, self.value_size, self.value_heads, self.value_heads

    @property
    def columns(self) -> tuple[int, ...]:
        """The columns of q, k, v, z, b and a."""
        heads = self.value_heads
        return self.key_size, self.key_size, self.value_size, self.value_size, heads, heads

    @property
    def channels(self) -> int:
        """The columns of q, k and v together."""
        return 2 * self.key_size + self.value_size

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim
