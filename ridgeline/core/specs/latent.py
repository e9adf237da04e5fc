"""Multi-head latent attention as data: a mixer that keeps one vector a token, from which all heads make their keys and
values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ridgeline.core.specs.division import Ranks
from ridgeline.core.specs.model import Growth, NormSpec, Product, Products, RopeSpec
from ridgeline.core.specs.state import DTYPE_BYTES, StateSpec


@dataclass(frozen=True, kw_only=True)
class LatentSpec(StateSpec):
    """The latent vectors of one layer: `width` numbers a token, which all heads share, in the activations' dtype."""

    kind: ClassVar[str] = "latent"
    width: int

    def unit_bytes(self, block_size: int, dtype: str) -> int:
        return block_size * self.token_bytes(dtype)

    def token_bytes(self, dtype: str) -> int:
        return self.width * DTYPE_BYTES[dtype]


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). The input is projected to a latent c and to a part
    r of the keys that is rotated and that all heads share. A head's key is its projection of norm(c) beside r, and its
    value another projection of norm(c). A query has two such parts as well. All are made of the input by one product,
    or by two with a norm between them.

    kept is norm(c) beside the rotated r. A query's first part, multiplied by the projection of the keys, can be
    compared with norm(c) itself, and what is attended is multiplied by the projection of the values afterwards, so keys
    and values need not be made. Rows of many tokens are cheaper with them.

    key_dim: the width of the part of a head's queries and keys that is not rotated.
    rope_dim: the width of the rotated part.
    value_dim: the width of a head's values.
    rank: the width of c.
    query_rank: the width between the two products of queries; 0: there is one product.
    rope: the rotation; None: nothing rotates.
    growth: how queries grow with their positions; None: not.
    latent_scale: multiplies norm(c).
    bias: the products that reduce the input, and the output projection, have biases.
    interleaved: in checkpoints, two neighbouring numbers rotate as a pair.
    """

    kind: ClassVar[str] = "latent_attention"
    summed: ClassVar[tuple[()]] = ()
    num_heads: int
    key_dim: int
    rope_dim: int
    value_dim: int
    rank: int
    query_rank: int
    scale: float
    norm: NormSpec
    rope: RopeSpec | None = None
    growth: Growth | None = None
    latent_scale: float = 1.0
    bias: bool = False
    interleaved: bool = True

    @property
    def states(self) -> tuple[LatentSpec]:
        return (LatentSpec(width=self.width),)

    @property
    def norms(self) -> tuple[tuple[NormSpec, int], ...]:
        latent = (self.norm, self.rank)
        return (latent, (self.norm, self.query_rank)) if self.query_rank else (latent,)

    @property
    def vectors(self) -> int:
        return 0

    @property
    def scratch(self) -> int:
        attended = 2 * self.num_heads * self.rank
        return sum(self.projected) + self.query_size + attended + self.num_heads * (self.rope_dim + self.value_dim)

    def products(self, width: int) -> Products:
        found = {"latent_in": Product(width, sum(self.projected), self.bias)}
        if self.query_rank:
            found["query"] = Product(self.query_rank, self.query_size)
        return found | {
            "expand": Product(self.rank, self.num_heads * (self.key_dim + self.value_dim)),
            "out": Product(self.num_heads * self.value_dim, width, self.bias),
        }

    def part(self, ranks: Ranks) -> LatentAttentionSpec:
        return replace(self, num_heads=ranks.part("attention heads", self.num_heads))

    @property
    def width(self) -> int:
        """The numbers that are kept of a token."""
        return self.rank + self.rope_dim

    @property
    def query_size(self) -> int:
        """The columns of all heads' queries."""
        return self.num_heads * (self.key_dim + self.rope_dim)

    @property
    def projected(self) -> tuple[int, int]:
        """The widths of the parts of the fused projection: queries, or what they are made of, and c with r."""
        return self.query_rank or self.query_size, self.width
