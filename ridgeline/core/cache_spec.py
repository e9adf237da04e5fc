"""What a layer remembers between steps, as data: bytes and blocks, no tensors.

A mixer declares its `CacheSpec`; layers with equal specs form a *cache group* and share one block table per
request. Host rules for a spec (resume points, what a window frees) live in `engine/cache/`, device rules in
`worker/state/`.

Memory is one buffer of equal *units*. A unit holds `block_size` tokens of one layer's state. A *page* is the
smallest run of units that every group divides without rest, so a page can serve any group and mixed models waste
nothing (the idea of an LCM page: Jenga, arXiv 2503.18292):

    group A: 2 layers ─┐  page = lcm(2, 3) = 6 units     A sees 3 blocks per page, B sees 2
    group B: 3 layers ─┘

Unit `u` of page `p` lies at index `u * num_pages + p`. So the units of one layer are contiguous in memory, and a
group's block table holds plain *block ids*: the index of the block's first layer. Layer `l` of the group is the same
table over a view of the buffer that starts `l * num_pages` units later. Kernels see an ordinary paged cache.
Page 0 is never handed out: its unit 0 is the *null block*, where stopped rows write.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from ridgeline.core.errors import InvalidConfig

NULL_BLOCK = 0

# Prompt tokens that a step can surely run beside a window's. Room for more is taken where there is some: a chunk can be
# as large as a step, and its keys lie beside the window's for the time of that one step alone.
WINDOW_CHUNK = 1024

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """Paged keys and values of one attention layer; `window` = None remembers everything.

    window: a token attends to itself and the `window - 1` tokens before it.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None

    def unit_bytes(self, block_size: int, dtype: str) -> int:
        """Bytes of one layer's block: keys and values of `block_size` tokens."""
        return 2 * self.num_kv_heads * self.head_dim * block_size * DTYPE_BYTES[dtype]

    def first_needed(self, position: int) -> int:
        """Smallest position that a query at `position` (or later) can still attend to."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def blocks_needed(self, num_tokens: int, max_chunk: int, block_size: int) -> int:
        """Blocks with which a request of `num_tokens` can run, in steps of `max_chunk` tokens, but with a window of
        at most WINDOW_CHUNK."""
        full = -(-num_tokens // block_size)
        if self.window is None:
            return full
        return min(full, -(-(self.window - 1 + min(max_chunk, WINDOW_CHUNK)) // block_size) + 1)


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers that share one spec and hence one block table."""

    spec: CacheSpec
    layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """How one buffer of `num_pages` pages serves all groups. Shared by the engine (ids) and the worker (views)."""

    groups: tuple[CacheGroup, ...]
    block_size: int
    dtype: str
    num_pages: int

    def __post_init__(self) -> None:
        sizes = {group.spec.unit_bytes(self.block_size, self.dtype) for group in self.groups}
        if len(sizes) > 1:
            raise InvalidConfig(
                f"cache groups need equal bytes per layer and block, these differ: {sorted(sizes)}; "
                "give all attention layers the same num_kv_heads * head_dim."
            )

    @cached_property
    def unit_bytes(self) -> int:
        return self.groups[0].spec.unit_bytes(self.block_size, self.dtype)

    @cached_property
    def units_per_page(self) -> int:
        return math.lcm(*(len(group.layers) for group in self.groups))

    @cached_property
    def page_bytes(self) -> int:
        return self.units_per_page * self.unit_bytes

    def blocks_per_page(self, group: int) -> int:
        """How many of this group's blocks one page holds."""
        return self.units_per_page // len(self.groups[group].layers)

    def block_id(self, group: int, page: int, index: int) -> int:
        """Id of block `index` of `page` as seen by `group` (see the module's picture)."""
        return index * len(self.groups[group].layers) * self.num_pages + page

    def page_of(self, block_id: int) -> int:
        return block_id % self.num_pages

    def pages_needed(self, num_tokens: int, max_chunk: int) -> int:
        """Pages that let one request of `num_tokens` run alone, whatever order its blocks come in."""
        return sum(
            -(-group.spec.blocks_needed(num_tokens, max_chunk, self.block_size) // self.blocks_per_page(g))
            for g, group in enumerate(self.groups)
        )


def group_layers(specs: list[CacheSpec]) -> tuple[CacheGroup, ...]:
    """Group layer indices by equal spec, full attention first (it bounds every prefix hit)."""
    by_spec: dict[CacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        by_spec.setdefault(spec, []).append(layer)
    ordered = sorted(by_spec.items(), key=lambda item: (item[0].window is not None, item[0].window or 0))
    return tuple(CacheGroup(spec=spec, layers=tuple(layers)) for spec, layers in ordered)
