"""Multi-head latent attention as data: a mixer that keeps one vector a token, from which all heads make their keys and
values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from ridgeline.core.specs.division import Ranks
from ridgeline.core.specs.model import Growth, NormSpec, Product, Products, RopeSpec
from ridgeline.core.specs.state import DTYPE_BYTES, StateSpec
from ridgeline.kernels.base.errors import InvalidConfig
from ridgeline.kernels.base.kv_format import KVFormat


@dataclass(frozen=True, kw_only=True)
class LatentSpec(StateSpec):
    """The latent vectors of one layer: `width` numbers a token, which all heads share, in the activations' dtype. The
    keys of an indexer, of `index_width` numbers, lie behind all of a block's vectors.

    rank: the numbers of a vector that belong to its latent; those behind them are rotated.
    format: how the indexer's keys are held, or, without an indexer, the latents. A block of levels has the rotated
        parts of its tokens, then their levels, then their scales. The scales of an indexer's keys lie behind all keys.
    """

    kind: ClassVar[str] = "latent"
    width: int
    rank: int
    index_width: int = 0
    format: KVFormat = field(default_factory=KVFormat)

    def unit_bytes(self, block_size: int, dtype: str) -> int:
        """Return the bytes of the vectors and keys of `block_size` tokens."""
        size = self.format.alignment(DTYPE_BYTES["float32"])
        return -(-block_size * self.token_bytes(dtype) // size) * size

    @property
    def levels(self) -> int:
        """The numbers of a vector that are held as levels."""
        return self.rank if self.format.quantized and not self.index_width else 0

    def token_bytes(self, dtype: str) -> int:
        held = self.levels or self.index_width
        return (self.width - self.levels) * DTYPE_BYTES[dtype] + (self.format.head_bytes(held, dtype) if held else 0)


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """The indexer of sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1). It scores every cached token by
    small keys of its own, and a token attends to the `selected` tokens with the highest scores, or to all if they are
    fewer.

    selected: tokens that a token attends to.
    heads, dim: its queries, and their width, which is that of the one key a token. The first numbers of both rotate as
        those of attention do.
    interleaved: in checkpoints, two neighbouring numbers rotate as a pair.
    norm: of keys.
    format: how keys are cached.
    """

    selected: int
    heads: int
    dim: int
    interleaved: bool
    norm: NormSpec = field(default_factory=lambda: NormSpec(kind="layer", eps=1e-6))
    format: KVFormat = field(default_factory=KVFormat)

    @property
    def scale(self) -> float:
        """The factor of scores."""
        return float((self.dim * self.heads) ** -0.5)


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
    indexer: what chooses the tokens that a token attends to; None: it attends to all.
    chooser: the number of an earlier layer, whose indexer's choice it takes; None: it has an indexer of its own.
    format: how norm(c) is cached, without an indexer; with one it has the activations' dtype.
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
    indexer: IndexerSpec | None = None
    chooser: int | None = None
    format: KVFormat = field(default_factory=KVFormat)

    @property
    def own_indexer(self) -> IndexerSpec | None:
        return self.indexer if self.chooser is None else None

    @property
    def states(self) -> tuple[LatentSpec]:
        if (index := self.own_indexer) is None:
            return (LatentSpec(width=self.width, rank=self.rank, format=self.format),)
        return (LatentSpec(width=self.width, rank=self.rank, index_width=index.dim, format=index.format),)

    @property
    def norms(self) -> tuple[tuple[NormSpec, int], ...]:
        found = ((self.norm, self.rank), *(((self.norm, self.query_rank),) if self.query_rank else ()))
        index = self.own_indexer
        return found if index is None else (*found, (index.norm, index.dim))

    @property
    def vectors(self) -> int:
        return 0

    @property
    def scratch(self) -> int:
        attended = 2 * self.num_heads * self.rank
        index = self.own_indexer
        chosen = 0 if index is None else 2 * index.heads * index.dim + index.dim + index.heads
        return (
            sum(self.projected)
            + self.query_size
            + attended
            + self.num_heads * (self.rope_dim + self.value_dim)
            + chosen
        )

    def products(self, width: int) -> Products:
        found = {"latent_in": Product(width, sum(self.projected), self.bias)}
        if self.query_rank:
            found["query"] = Product(self.query_rank, self.query_size)
        if (index := self.own_indexer) is not None:
            heads, dim = index.heads, index.dim
            found["indexer.query"] = Product(self.query_rank, heads * dim)
            found |= {"indexer.key": Product(width, dim), "indexer.weights": Product(width, heads)}
        return found | {
            "expand": Product(self.rank, self.num_heads * (self.key_dim + self.value_dim)),
            "out": Product(self.num_heads * self.value_dim, width, self.bias),
        }

    def part(self, ranks: Ranks) -> LatentAttentionSpec:
        return replace(self, num_heads=ranks.part("attention heads", self.num_heads))

    def with_cache_format(self, wanted: KVFormat) -> LatentAttentionSpec:
        """Return the mixer with its latents, or the keys of its indexer if it has one, cached in this format of 8 bits.
        Latents beside an indexer stay as they are. Raises InvalidConfig for numbers that the format cannot hold."""
        held, width = ("latents", self.rank) if self.indexer is None else ("index keys", self.indexer.dim)
        if not wanted.quantized:
            raise InvalidConfig(
                f"kv_cache_dtype {wanted.dtype} is for keys and values, and this model keeps latent vectors in the "
                f"dtype of its activations; use auto, or fp8 or int8 for its {held}."
            )
        if width % 2:
            raise InvalidConfig(
                f"kv_cache_dtype {wanted.dtype} needs {held} of even width, and this model's have {width}; use auto."
            )
        own = replace(wanted, scales="row")
        return (
            replace(self, format=own)
            if self.indexer is None
            else replace(self, indexer=replace(self.indexer, format=own))
        )

    @property
    def width(self) -> int:
        """The numbers that are kept of a token."""
        return self.rank + self.rope_dim

    @property
    def widths(self) -> dict[str, int]:
        """The widths that costs depend on, by name."""
        return {name: getattr(self, name) for name in ("key_dim", "rope_dim", "value_dim", "rank")}

    @property
    def query_size(self) -> int:
        """The columns of all heads' queries."""
        return self.num_heads * (self.key_dim + self.rope_dim)

    @property
    def projected(self) -> tuple[int, int]:
        """The widths of the parts of the fused projection: queries, or what they are made of, and c with r."""
        return self.query_rank or self.query_size, self.width
