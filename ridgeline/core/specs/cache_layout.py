"""The layout of one pool of memory that serves layers with states of all kinds.

Layers with equal specs form a *cache group* and share one block table per request. A *unit* is one layer's block. A
*slab* is the piece of memory that any group can use: it holds as many units of one layer as fit, and the rest is
padding. A *page* is the smallest number of slabs that every group's layers divide, so a page can serve any group, and
models with several groups waste nothing but the padding (the idea of an LCM page: Jenga, arXiv 2503.18292):

    group A: 2 layers ─┐  page = lcm(2, 3) = 6 slabs     A sees 3 blocks per page, B sees 2, if a slab is a unit
    group B: 3 layers ─┘

Slab `j` of page `p` lies at index `j * all_pages + p`. So the slabs of one layer are contiguous in memory, and a
group's block table holds plain *block ids*: places in the memory of the group's first layer, counted in *steps*. A step
is a slab if a slab holds one unit; otherwise it is the largest number of bytes that divides both. Layer `l` of the
group uses the same table over a view of the memory that starts `l * all_pages` slabs later. Kernels see an ordinary
paged cache, whose blocks begin at multiples of the step.

Page 0 is never handed out: its first unit is the *null block*, to which stopped rows write. Nor are the pages behind
the last one, the *scratch*, where a step that verifies drafts leaves states of constant size until it is known which of
them stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ridgeline.core.specs.state import KVSpec, StateSpec
from ridgeline.kernels.base.limits import NULL_BLOCK as NULL_BLOCK

PADDING = 0.02  # the share of a slab that may be padding; less would need larger slabs, and so larger pages
MOST_UNITS = 64  # units of the largest kind in a slab, at most
ALIGNMENT = 256  # where units are unlike, each begins at a multiple of so many bytes


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers that share one spec and hence one block table.

    spare: how many more layers there is memory for. Stages of a pipeline share block ids, so each has room for as many
        layers as the stage that has most.
    """

    spec: StateSpec
    layers: tuple[int, ...]
    spare: int = 0

    @cached_property
    def depth(self) -> int:
        """The number of layers that there is memory for."""
        return len(self.layers) + self.spare


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """The division of one buffer of `num_pages` pages among all cache groups. The engine takes block ids from it, the
    worker views of the memory.

    block_size: tokens of a block.
    num_pages: those that requests use, the first one included.
    ranks: how many ranks deal a block's tokens out between them (`core.plan.stripes`). Each has such a buffer, with the
        same blocks, and so `block_size` / `ranks` tokens of each.
    scratch: states that a step may write beside those of requests, in each group whose blocks are exact.
    """

    groups: tuple[CacheGroup, ...]
    block_size: int
    dtype: str
    num_pages: int
    ranks: int = 1
    scratch: int = 0

    @property
    def tokens_held(self) -> int:
        """The tokens of a block that one rank holds."""
        return self.block_size // self.ranks

    @cached_property
    def unit_bytes(self) -> tuple[int, ...]:
        """Bytes of one layer's block, by group. Unlike ones are filled up to whole alignments. The steps between block
        ids are then whole alignments too, which kernels like, and ids stay far below what 32 bits hold."""
        units = [group.spec.unit_bytes(self.tokens_held, self.dtype) for group in self.groups]
        size = ALIGNMENT if len(set(units)) > 1 else 1
        return tuple(-(-unit // size) * size for unit in units)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """A name for each group: its kind, and what sets it apart from others of that kind."""
        names: list[str] = []
        for group in self.groups:
            window = None if group.spec.exact else group.spec.span
            name = group.spec.kind if window is None else f"{group.spec.kind}_window_{window}"
            same = sum(other == name or other.startswith(f"{name}_no_") for other in names)
            names.append(f"{name}_no_{same + 1}" if same else name)
        return tuple(names)

    @property
    def kv_dtypes(self) -> tuple[str, ...]:
        """The dtypes of keys and values: mostly one, and none for a model without."""
        specs = (group.spec for group in self.groups)
        return tuple(sorted({spec.format.dtype or self.dtype for spec in specs if isinstance(spec, KVSpec)}))

    @cached_property
    def slab_bytes(self) -> int:
        """Bytes of a slab: the smallest multiple of the largest unit that serves all groups with little padding."""
        largest = max(self.unit_bytes)
        sizes = [largest * count for count in range(1, MOST_UNITS + 1)]
        little = (size for size in sizes if max(self._padding(size)) <= PADDING)
        return next(little, min(sizes, key=lambda size: max(self._padding(size))))

    def _padding(self, slab_bytes: int) -> list[float]:
        return [slab_bytes % unit / slab_bytes for unit in self.unit_bytes]

    @property
    def padding(self) -> tuple[float, ...]:
        """The share of a slab that holds nothing, by group: the rest, and what its units are filled up with."""
        held = (group.spec.unit_bytes(self.tokens_held, self.dtype) for group in self.groups)
        return tuple(1 - n * unit / self.slab_bytes for n, unit in zip(self.units_per_slab, held, strict=True))

    @cached_property
    def units_per_slab(self) -> tuple[int, ...]:
        return tuple(self.slab_bytes // unit for unit in self.unit_bytes)

    @cached_property
    def step_bytes(self) -> tuple[int, ...]:
        """Bytes from one block id to the next, by group."""
        slab = self.slab_bytes
        sizes = zip(self.unit_bytes, self.units_per_slab, strict=True)
        return tuple(slab if count == 1 else math.gcd(slab, unit) for unit, count in sizes)

    @cached_property
    def ids_per_slab(self) -> tuple[int, ...]:
        return tuple(self.slab_bytes // step for step in self.step_bytes)

    @cached_property
    def slabs_per_page(self) -> int:
        return math.lcm(*(group.depth for group in self.groups))

    @cached_property
    def page_bytes(self) -> int:
        return self.slabs_per_page * self.slab_bytes

    def blocks_per_page(self, group: int) -> int:
        """Return the number of this group's blocks that one page holds."""
        return self.slabs_per_page // self.groups[group].depth * self.units_per_slab[group]

    @cached_property
    def _scratch_pages(self) -> tuple[int, ...]:
        """The pages of scratch, by group."""
        return tuple(
            -(-self.scratch // self.blocks_per_page(g)) if group.spec.exact else 0
            for g, group in enumerate(self.groups)
        )

    @cached_property
    def all_pages(self) -> int:
        """The pages of the buffer: those of requests, and the scratch."""
        return self.num_pages + sum(self._scratch_pages)

    def scratch_blocks(self, group: int) -> list[int]:
        """Return the ids of the group's blocks of scratch."""
        per_page, first = self.blocks_per_page(group), self.num_pages + sum(self._scratch_pages[:group])
        count = self.scratch if self.groups[group].spec.exact else 0
        return [self.block_id(group, first + n // per_page, n % per_page) for n in range(count)]

    def block_id(self, group: int, page: int, index: int) -> int:
        """Return the id of block `index` of `page` as `group` sees it (see the picture at the top of the module)."""
        slab, unit = divmod(index, self.units_per_slab[group])
        first = (slab * self.groups[group].depth * self.all_pages + page) * self.ids_per_slab[group]
        return first + unit * (self.unit_bytes[group] // self.step_bytes[group])

    def page_of(self, group: int, block_id: int) -> int:
        return block_id // self.ids_per_slab[group] % self.all_pages

    def layer_step(self, group: int) -> int:
        """Return the distance in block ids from one layer of the group to the next, counted from the first layer's
        memory."""
        return self.all_pages * self.ids_per_slab[group]

    def pages_needed(self, num_tokens: int, max_chunk: int, encoded: int = 0) -> int:
        """Return the number of pages with which one request of `num_tokens` runs alone, in whatever order it gets its
        blocks. encoded: tokens of its encoder input."""
        total = 0
        for g, group in enumerate(self.groups):
            tokens = encoded if group.spec.encoded else num_tokens
            total -= -group.spec.blocks_needed(tokens, max_chunk, self.block_size) // self.blocks_per_page(g)
        return total


def group_layers(specs: Sequence[Sequence[StateSpec]]) -> tuple[CacheGroup, ...]:
    """Group layer indices by equal specs, of which a layer may have several. Groups that remember everything come
    first, since they bound every prefix hit, and those of an encoder's output last."""
    by_spec: dict[StateSpec, list[int]] = {}
    for layer, own in enumerate(specs):
        for spec in own:
            by_spec.setdefault(spec, []).append(layer)
    ordered = sorted(by_spec.items(), key=lambda item: (item[0].encoded, item[0].span is not None, item[0].span or 0))
    return tuple(CacheGroup(spec=spec, layers=tuple(layers)) for spec, layers in ordered)
