"""The shape of a network that one launch can decode with: Llama's kind of layers, without a word about files or specs.

Letters as in CONTRIBUTING.md.
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS = 8  # the most rows of a step: the columns of one matrix instruction


@dataclass(frozen=True, kw_only=True)
class DenseShape:
    """Layers of attention and a gated feed-forward with a norm before each, and an output layer behind a norm.

    layers: how many.
    width: M. heads: H. kv_heads: G. head_dim: D. rotated: Y, the first numbers of a head that rotate (0: none).
    inner: F, the width of the feed-forward. vocabulary: V.
    scale: of a query's products with keys.
    eps: of all norms of the residual. head_eps: of the norms of queries and keys (None: they have none).
    qkv_bias: the projection to queries, keys and values has a bias.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    inner: int
    vocabulary: int
    scale: float
    eps: float
    head_eps: float | None = None
    qkv_bias: bool = False

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def projected(self) -> int:
        """X, the outputs of the fused projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attended(self) -> int:
        """The numbers of all query heads."""
        return self.heads * self.head_dim

    @property
    def weight_numbers(self) -> int:
        """The numbers of all matrices that a step reads, each once."""
        layer = self.width * (self.projected + self.attended + 3 * self.inner)
        return self.layers * layer + self.vocabulary * self.width
