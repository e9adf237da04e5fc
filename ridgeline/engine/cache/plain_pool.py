"""The block pool where there is one group, a page is a block, and all content is worth the same: most models.

It does what `BlockPool` does, with a table of references in place of an object for each block, and moves many blocks at
once. Idle blocks of equal rank lie in a line by the time at which they became idle. There are three ranks: that of
content in general, of sessions that are expected back, and of what preempted requests will come back for.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from math import inf

from ridgeline.core.specs.cache_layout import NULL_BLOCK
from ridgeline.engine.cache.pool import BlockPool, Pages


def pool_of(
    layout: Pages,
    on_evict: Callable[[int, Sequence[int]], None] = lambda group, blocks: None,
    worth: Callable[[int, Sequence[int]], float] | None = None,
    most_states: int | None = None,
) -> BlockPool:
    """Return a pool for a division of memory. The arguments are those of `BlockPool`."""
    if worth is None and len(layout.groups) == 1 and layout.blocks_per_page(0) == 1:
        return PlainPool(layout, on_evict)
    return BlockPool(layout, on_evict, worth, most_states)


class PlainPool(BlockPool):
    """A block is fresh, held or idle; only content that is cached is kept while nothing holds it."""

    def __init__(
        self, layout: Pages, on_evict: Callable[[int, Sequence[int]], None] = lambda group, blocks: None
    ) -> None:
        super().__init__(layout, on_evict)
        self._refs = [0] * layout.num_pages
        self._known = bytearray(layout.num_pages)  # 1: the content is cached
        self._lines: tuple[OrderedDict[int, None], ...] = (OrderedDict(), OrderedDict(), OrderedDict())

    # ---- asking -----------------------------------------------------------------------------------------------

    @property
    def free_pages(self) -> int:
        return len(self._fresh) + self.num_idle

    @property
    def num_idle(self) -> int:
        usual, pinned, expected = self._lines
        return len(usual) + len(pinned) + len(expected)

    def count(self, group: int) -> tuple[int, int, int]:
        return self.num_pages - self.free_pages, self.num_idle, 0

    def blocks_in_use(self, group: int) -> list[int]:
        return [block for block, refs in enumerate(self._refs) if refs or self._known[block]]

    @property
    def awaited_pages(self) -> int:
        return len(self._lines[2])

    def can_take(self, wanted: Sequence[int], freed: Sequence[Sequence[int]] = ()) -> bool:
        free = self.free_pages
        for blocks in freed:
            free += sum(self._refs[block] == refs for block, refs in Counter(blocks).items())
        return wanted[0] <= free

    def surely_has(self, count: int) -> bool:
        return count <= self.free_pages

    def is_worth(self, group: int, worth: float) -> bool:
        return bool(self._fresh or self._lines[0])

    def refs(self, group: int, block: int) -> int:
        return self._refs[block]

    def is_cached(self, group: int, block: int) -> bool:
        return bool(self._known[block])

    # ---- taking and giving back -------------------------------------------------------------------------------

    def take(self, wanted: Sequence[int], *, fill: bool = True) -> list[list[int]] | None:
        count, fresh = wanted[0], self._fresh
        if count > len(fresh):
            if count > self.free_pages:
                return None
            self._evict_pages(count - len(fresh))
        first = len(fresh) - count
        taken = fresh[first:]
        del fresh[first:]
        taken.reverse()
        refs = self._refs
        for block in taken:
            refs[block] = 1
        return [taken]

    def _evict_pages(self, count: int) -> None:
        """Give up the content of so many idle blocks, those first that are worth least."""
        gone = list[int]()
        for line in self._lines:
            gone += [line.popitem(last=False)[0] for _ in range(min(count - len(gone), len(line)))]
        for block in gone:
            self._known[block] = 0
        self._on_evict(0, gone)
        if self._awaited:
            for block in gone:
                self._awaited.pop(block, None)
        gone.reverse()
        self._fresh[:0] = gone

    def share(self, group: int, block: int) -> None:
        if not (refs := self._refs[block]):
            if not self._known[block]:
                raise KeyError(block)
            del self._lines[self._rank_of(block)][block]
        self._refs[block] = refs + 1

    def release_all(self, group: int, blocks: Sequence[int], last_plan: int) -> None:
        refs, known, newest, awaited = self._refs, self._known, self._last_plan, self._awaited
        usual, fresh = self._lines[0], self._fresh
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            left = refs[block] - 1
            if left < 0:
                raise AssertionError(f"block {block} of group {group} released twice")
            refs[block] = left
            if last_plan > newest[block]:
                newest[block] = last_plan
            if left:
                continue
            if not known[block]:
                fresh.append(block)
                awaited.pop(block, None)
            elif block in awaited:
                self._lines[self._rank_of(block)][block] = None
            else:
                usual[block] = None

    def release(self, group: int, block: int, last_plan: int) -> None:
        self.release_all(group, (block,), last_plan)

    # ---- content ----------------------------------------------------------------------------------------------

    def mark_cached(self, group: int, block: int) -> None:
        self._known[block] = 1

    def forget(self, group: int, block: int) -> None:
        self._known[block] = 0
        if not self._refs[block]:
            del self._lines[self._rank_of(block)][block]
            self._fresh.append(block)
            self._awaited.pop(block, None)

    # ---- inside -----------------------------------------------------------------------------------------------

    def _rank_of(self, block: int) -> int:
        """Return in which line an idle block lies."""
        owners = self._awaited.get(block)
        return 0 if not owners else 2 if inf in owners.values() else 1

    def _rank_again(self, page: int) -> None:
        for line in self._lines:
            if page in line:
                del line[page]
                self._lines[self._rank_of(page)][page] = None
                return
