"""The block pool: who holds which block of the KV cache. Every operation is O(1) in the number of blocks.

A *page* belongs to one cache group at a time and is cut into that group's blocks (`core.cache_spec` has the picture).
With a single group a page is a block. A block is in one of four states:

    held      some request refers to it (refs > 0)
    cached    nobody refers to it, but the prefix index knows its content; kept until evicted, oldest first
    open      nobody refers to it and its content is worthless; its page has other blocks in use
    (gone)    its page is fresh: no group owns it

*Freed is not yet free*: a freed block may be reused at once by the compute stream, where the write comes after every
earlier read, but any other reader or writer (copy to host, disk, network) must wait until the last plan that named
the block has retired. `is_quiet` answers that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from ridgeline.core.cache_spec import CacheLayout


class _Block:
    __slots__ = ("cached", "last_plan", "refs")

    def __init__(self) -> None:
        self.refs = 0
        self.cached = False
        self.last_plan = 0


class BlockPool:
    """`on_evict(group, block)` is called when a cached block's content is about to be given up."""

    def __init__(self, layout: CacheLayout, on_evict: Callable[[int, int], None] = lambda group, block: None) -> None:
        groups = range(len(layout.groups))
        self.layout = layout
        self._on_evict = on_evict
        self._per_page = [layout.blocks_per_page(g) for g in groups]
        self._fresh = list(range(layout.num_pages - 1, 0, -1))  # page 0 holds the null block
        self._busy: dict[int, int] = {}  # page → its held blocks
        self._blocks: list[dict[int, _Block]] = [{} for _ in groups]
        self._open: list[dict[int, None]] = [{} for _ in groups]
        self._cached: list[OrderedDict[int, int]] = [OrderedDict() for _ in groups]  # block → time it was freed
        self._idle: list[OrderedDict[int, int]] = [OrderedDict() for _ in groups]  # page without held blocks → time
        self._clock = 0

    # ---- asking -----------------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Pages that can be handed out."""
        return self.layout.num_pages - 1

    @property
    def free_pages(self) -> int:
        """Pages that any group could take now (fresh, or holding nothing but cached blocks)."""
        return len(self._fresh) + sum(map(len, self._idle))

    def can_take(self, wanted: Sequence[int]) -> bool:
        """Whether `wanted[g]` blocks could be taken for every group g together."""
        pages = 0
        for group, count in enumerate(wanted):
            if count > 0:
                pages += -(-max(0, count - self._spare(group)) // self._per_page[group])
        return pages <= self.free_pages

    def refs(self, group: int, block: int) -> int:
        found = self._blocks[group].get(block)
        return found.refs if found else 0

    def is_cached(self, group: int, block: int) -> bool:
        found = self._blocks[group].get(block)
        return found is not None and found.cached

    def is_quiet(self, group: int, block: int, retired_plan: int) -> bool:
        """True when no plan still in flight names this unheld block (other streams may touch it)."""
        found = self._blocks[group].get(block)
        return found is None or (found.refs == 0 and found.last_plan <= retired_plan)

    def _spare(self, group: int) -> int:
        """Unheld blocks of the group in pages that are also in use (whole unheld pages are counted as pages)."""
        unheld = len(self._open[group]) + len(self._cached[group])
        return unheld - len(self._idle[group]) * self._per_page[group]

    # ---- taking and giving back -------------------------------------------------------------------------------

    def take(self, group: int) -> int | None:
        """A block with one reference and no content, or None when every block is held."""
        block = self._find(group)
        if block is not None:
            self._blocks[group][block].refs = 1
            self._enter_use(group, block)
        return block

    def share(self, group: int, block: int) -> None:
        """One more reference to a block that is held or cached (a prefix hit)."""
        state = self._blocks[group][block]
        state.refs += 1
        if state.refs == 1:
            del self._cached[group][block]
            self._enter_use(group, block)

    def release(self, group: int, block: int, last_plan: int) -> None:
        """Drop one reference. `last_plan`: newest plan that may name the block."""
        state = self._blocks[group][block]
        if state.refs == 0:
            raise AssertionError(f"block {block} of group {group} released twice")
        state.refs -= 1
        state.last_plan = max(state.last_plan, last_plan)
        if state.refs:
            return
        self._clock += 1
        if state.cached:
            self._cached[group][block] = self._clock
        else:
            self._open[group][block] = None
        page = self.layout.page_of(block)
        self._busy[page] -= 1
        if self._busy[page] == 0:
            self._idle[group][page] = self._clock
            self._dissolve_if_worthless(group, page)

    # ---- content ----------------------------------------------------------------------------------------------

    def mark_cached(self, group: int, block: int) -> None:
        """The prefix index now knows this held block's content."""
        self._blocks[group][block].cached = True

    def forget(self, group: int, block: int) -> None:
        """The block's content is worthless from now on (evicted, or written by a plan that failed)."""
        state = self._blocks[group][block]
        state.cached = False
        if state.refs == 0:
            del self._cached[group][block]
            self._open[group][block] = None
            self._dissolve_if_worthless(group, self.layout.page_of(block))

    # ---- inside -----------------------------------------------------------------------------------------------

    def _find(self, group: int) -> int | None:
        if self._open[group]:
            return self._open[group].popitem()[0]
        if self._fresh:
            return self._cut(group, self._fresh.pop())
        return self._evict(group)

    def _evict(self, group: int) -> int | None:
        """Give up the oldest content: one cached block of this group, or a whole idle page of another."""
        own = next(iter(self._cached[group].items()), None)
        others = [
            (time, other, page)
            for other, idle in enumerate(self._idle)
            if other != group
            for page, time in [next(iter(idle.items()), (0, 0))]
            if page
        ]
        oldest = min(others, default=None)
        if own is not None and (oldest is None or own[1] <= oldest[0]):
            block = own[0]
            self._on_evict(group, block)
            self._blocks[group][block].cached = False
            del self._cached[group][block]
            return block
        if oldest is None:
            return None
        _, other, page = oldest
        for block in self._blocks_of(other, page):
            if self._blocks[other][block].cached:
                self._on_evict(other, block)
                self._blocks[other][block].cached = False
                del self._cached[other][block]
                self._open[other][block] = None
        self._dissolve_if_worthless(other, page)
        return self._cut(group, self._fresh.pop())

    def _cut(self, group: int, page: int) -> int:
        """Hand a fresh page to the group; returns its first block, the others are open."""
        first, *others = self._blocks_of(group, page)
        self._busy[page] = 0
        self._idle[group][page] = self._clock
        for block in (first, *others):
            self._blocks[group][block] = _Block()
        self._open[group].update(dict.fromkeys(reversed(others)))
        return first

    def _enter_use(self, group: int, block: int) -> None:
        page = self.layout.page_of(block)
        if self._busy[page] == 0:
            del self._idle[group][page]
        self._busy[page] += 1

    def _dissolve_if_worthless(self, group: int, page: int) -> None:
        """Return a page without held or cached blocks to the common stock."""
        blocks = self._blocks_of(group, page)
        if self._busy[page] or any(self._blocks[group][block].cached for block in blocks):
            return
        for block in blocks:
            del self._blocks[group][block]
            del self._open[group][block]
        del self._busy[page]
        del self._idle[group][page]
        self._fresh.append(page)

    def _blocks_of(self, group: int, page: int) -> list[int]:
        return [self.layout.block_id(group, page, index) for index in range(self._per_page[group])]
