"""The block pool: the references to each block of the KV cache. Every operation is O(1) in the number of blocks.

A *page* belongs to one cache group at a time and is cut into that group's blocks (`core.specs.cache_layout` has the
picture). With a single group a page is a block. A page is fresh (no group owns it), busy (some of its blocks are held)
or idle (none is held, some content is worth keeping). A block of a busy page is in one of three states:

    held      some request refers to it (refs > 0)
    spare     no request refers to it, but the prefix index knows its content
    open      no request refers to it, and its content is worthless

Blocks are taken from the open ones, then an idle page of the group that is not full, then fresh pages, then the idle
page that is worth least; only when these do not suffice are spare blocks given up, since their pages help no other
group. So a group grows by a page only when every block it could reuse is in use, and `can_take` can count instead of
search: it counts open and spare blocks alike, so a page that is filled up counts like one that is cut.

*Filling up.* An idle page has fewer open blocks than a fresh one. The filled pages of a group lack no more blocks, all
together, than one page has. So the group has at most one page more than if it had cut fresh ones, and a `take` fills up
only while there is such a page to spare. The page that was laid down last comes first: then content of one age shares a
page and is evicted together.

An idle page's rank is the clock at the time when it became idle and what its content is worth. Each eviction sets the
clock to the evicted page's rank, so what was used lately outlives what was not, by as much as it is worth more
(GreedyDual: Young 1994; with sizes: Cao and Irani 1997; all pages have the same size here). Where all are worth the
same, the page goes first that was freed longest ago. A page that a preempted request will come back for has the highest
rank of all: it is evicted when nothing else is idle. Below it are pages of sessions that are expected back (`PINNED`).

*Freed is not yet free*: the compute stream may reuse a freed block at once, since its write comes after every earlier
read there. Any other reader or writer (copy to host, disk, network) must wait until the last plan that named the block
has retired. `is_quiet` answers that.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from math import inf
from typing import Protocol

from ridgeline.core.specs.cache_layout import NULL_BLOCK, CacheGroup
from ridgeline.engine.cache.idle import Idle, IdlePages

PINNED = (
    1e300  # the rank of pages that are kept for a session: above all worth, and below what a request comes back for
)


class Pages(Protocol):
    """The division of a memory into pages and blocks: `CacheLayout` on the device, `HostLayout` on the host."""

    @property
    def groups(self) -> tuple[CacheGroup, ...]: ...
    @property
    def num_pages(self) -> int: ...
    def blocks_per_page(self, group: int) -> int: ...
    def block_id(self, group: int, page: int, index: int) -> int: ...
    def page_of(self, group: int, block_id: int) -> int: ...


class _Block:
    __slots__ = ("cached", "refs")

    def __init__(self, refs: int) -> None:
        self.refs = refs
        self.cached = False


class BlockPool:
    """`on_evict(group, blocks)` is called when the content of some cached blocks is about to be evicted.

    worth: what the cached blocks of one of the group's pages are worth, in the tokens that must run again without them.
        None: all are worth the same.
    most_states: how many idle pages the groups whose states are exact may have. Beyond them the page that is worth
        least is evicted.
    """

    def __init__(
        self,
        layout: Pages,
        on_evict: Callable[[int, Sequence[int]], None] = lambda group, blocks: None,
        worth: Callable[[int, Sequence[int]], float] | None = None,
        most_states: int | None = None,
    ) -> None:
        groups = range(len(layout.groups))
        self.layout = layout
        self._on_evict = on_evict
        self._per_page = [layout.blocks_per_page(g) for g in groups]
        self._fresh = list(range(layout.num_pages - 1, 0, -1))  # page 0 holds the null block
        self._busy: dict[int, int] = {}  # page some group owns → its held blocks
        self._idle: dict[int, int] = {}  # idle page → its group
        tokens, states = IdlePages(), IdlePages()
        self._ranked = tokens, states
        self._ranked_of = [states if group.spec.exact else tokens for group in layout.groups]
        self._worth, self._most_states = worth, layout.num_pages if most_states is None else most_states
        self._clock, self._order = 0.0, 0
        self._blocks: list[dict[int, _Block]] = [{} for _ in groups]
        self._open: list[OrderedDict[int, None]] = [OrderedDict() for _ in groups]
        self._spare: list[OrderedDict[int, None]] = [OrderedDict() for _ in groups]
        self._partial: list[OrderedDict[int, int]] = [OrderedDict() for _ in groups]  # idle page → open blocks; by age
        self._filled: dict[int, int] = {}  # busy page that is filled up → the blocks that it lacked
        self._lacking = [0] * len(groups)  # their sum
        self._last_plan = [0] * layout.num_pages  # newest plan that may refer to a block given back to the page
        self._awaited: dict[int, dict[Hashable, float]] = {}  # page → who comes back for it, and its rank for that one
        self._awaits: dict[Hashable, dict[int, None]] = {}  # and the other way round; some pages may be others' by now

    # ---- asking -----------------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Pages that can be handed out."""
        return self.layout.num_pages - 1

    @property
    def free_pages(self) -> int:
        """Pages that any group could take now (fresh or idle)."""
        return len(self._fresh) + len(self._idle)

    @property
    def fresh_pages(self) -> int:
        """Pages without content."""
        return len(self._fresh)

    @property
    def num_idle(self) -> int:
        """Pages that no request uses, and whose content can be found again."""
        return len(self._idle)

    def count(self, group: int) -> tuple[int, int, int]:
        """Return the group's blocks that are held, whose content is kept beside those, and that are empty."""
        idle = list(self._idle.values()).count(group) * self._per_page[group]
        lacking, opened, spare = sum(self._partial[group].values()), len(self._open[group]), len(self._spare[group])
        return len(self._blocks[group]) - opened - spare - idle, spare + idle - lacking, opened + lacking

    def blocks_in_use(self, group: int) -> list[int]:
        """Return the blocks of the group's pages."""
        return list(self._blocks[group])

    @property
    def awaited_pages(self) -> int:
        """Free pages to which a preempted request comes back."""
        return sum(page in self._idle for page, owners in self._awaited.items() if inf in owners.values())

    def awaiting(self, group: int, block: int) -> list[Hashable]:
        """Return the preempted requests that come back for the block's page."""
        owners = self._awaited.get(self._page_of(group, block), {})
        return [owner for owner, rank in owners.items() if rank == inf]

    @property
    def most_awaited(self) -> int:
        """At least as many as `awaited_pages`, known at once."""
        return len(self._awaited)

    def can_take(self, wanted: Sequence[int], freed: Sequence[Sequence[int]] = ()) -> bool:
        """Tell if `wanted[g]` blocks could be taken for every group g together; if given, after the blocks `freed[g]`
        were released, each as often as it is listed."""
        unheld = [len(opened) + len(spare) for opened, spare in zip(self._open, self._spare, strict=True)]
        free_pages = self.free_pages
        for g, blocks in enumerate(freed):
            let_go = [block for block, refs in Counter(blocks).items() if self._blocks[g][block].refs == refs]
            for page, count in Counter(self._page_of(g, block) for block in let_go).items():
                whole = self._busy[page] == count
                free_pages += whole
                unheld[g] += count - whole * self._per_page[g]  # a free page's other blocks are no group's any more
        return self._pages_for(wanted, unheld) <= free_pages

    def surely_has(self, count: int) -> bool:
        """Return True if there is one group, of which a sequence could start with so many blocks, whatever it finds.
        False says nothing."""
        return False

    def is_worth(self, group: int, worth: float) -> bool:
        """Return True if a block of so much worth should be taken: there is memory to spare, or what would be evicted
        for it is worth less."""
        if self._open[group] or self._fresh or self._to_fill(group) is not None:
            return True
        least = self._least()
        return least is not None and least.rank <= self._clock + worth

    @property
    def idle_states(self) -> int:
        """Idle pages of groups whose states are exact."""
        return len(self._ranked[1])

    def refs(self, group: int, block: int) -> int:
        found = self._blocks[group].get(block)
        return found.refs if found else 0

    def is_cached(self, group: int, block: int) -> bool:
        found = self._blocks[group].get(block)
        return found is not None and found.cached

    def is_quiet(self, group: int, block: int, retired_plan: int) -> bool:
        """True when no request holds the block and no plan in flight refers to it (other streams may touch it)."""
        return self.refs(group, block) == 0 and self._last_plan[self._page_of(group, block)] <= retired_plan

    def _pages_for(self, wanted: Sequence[int], at_hand: Sequence[int]) -> int:
        """Pages to take for `wanted` blocks beyond the `at_hand` ones."""
        counts = zip(wanted, at_hand, self._per_page, strict=True)
        return sum(-(-max(0, want - have) // per_page) for want, have, per_page in counts)

    # ---- taking and giving back -------------------------------------------------------------------------------

    def take(self, wanted: Sequence[int], *, fill: bool = True) -> list[list[int]] | None:
        """`wanted[g]` blocks for every group g, each with one reference and no content; None if there are too few.

        fill: idle pages may be filled up. Without, the blocks fill whole pages.
        """
        to_spare = self.free_pages - self._pages_for(wanted, [len(opened) for opened in self._open])
        if to_spare < 0 and not self.can_take(wanted):
            return None
        taken: list[list[int]] = []
        for g, count in enumerate(wanted):
            fills = fill and to_spare > 0 and count > len(self._open[g]) and self._to_fill(g) is not None
            taken.append([self._take(g, to_spare < 0, fills) for _ in range(count)])
            to_spare -= fills
        return taken

    def share(self, group: int, block: int) -> None:
        """Add a reference to a block that is held or cached (a prefix hit)."""
        state = self._blocks[group][block]
        if state.refs == 0 and self._per_page[group] == 1:
            del self._idle[block]
            self._ranked_of[group].discard(block)
            self._busy[block] = state.refs = 1
        elif state.refs == 0:
            self._wake(group, self._page_of(group, block))
            self._hold(group, block)
        else:
            state.refs += 1

    def release_all(self, group: int, blocks: Sequence[int], last_plan: int) -> None:
        """Drop one reference to each of these blocks, the last first. NULL_BLOCK is left out."""
        if self._per_page[group] != 1 or self._worth is not None:
            for block in reversed(blocks):
                if block != NULL_BLOCK:
                    self.release(group, block, last_plan)
            return
        states, busy, idle, newest = self._blocks[group], self._busy, self._idle, self._last_plan
        add, clock, awaited = self._ranked_of[group].add, self._clock, self._awaited
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            state = states[block]
            if state.refs != 1 or not state.cached or block in awaited:
                self.release(group, block, last_plan)
                continue
            state.refs = busy[block] = 0
            if last_plan > newest[block]:
                newest[block] = last_plan
            idle[block] = group
            self._order = order = self._order + 1
            add(Idle(clock, order, block))

    def release(self, group: int, block: int, last_plan: int) -> None:
        """Drop one reference. `last_plan`: newest plan that may refer to the block."""
        state, page = self._blocks[group][block], self._page_of(group, block)
        if state.refs == 0:
            raise AssertionError(f"block {block} of group {group} released twice")
        state.refs -= 1
        if last_plan > self._last_plan[page]:
            self._last_plan[page] = last_plan
        if state.refs:
            return
        if self._per_page[group] == 1:
            self._busy[page], self._idle[page] = 0, group
            return self._settle_idle(group, page, [block] if state.cached else [])
        (self._spare if state.cached else self._open)[group][block] = None
        self._busy[page] -= 1
        if self._busy[page] == 0:
            self._lay_down(group, page)

    # ---- content ----------------------------------------------------------------------------------------------

    def mark_cached(self, group: int, block: int) -> None:
        """The prefix index now knows this held block's content."""
        self._blocks[group][block].cached = True

    def forget(self, group: int, block: int) -> None:
        """The block's content is worthless from now on (evicted, or written by a plan that failed)."""
        state, page = self._blocks[group][block], self._page_of(group, block)
        if self._busy[page] == 0:
            state.cached = False
            partial = self._partial[group]
            if page not in partial:
                partial[page] = 0
                partial.move_to_end(page, last=False)  # others were laid down later, most likely
            partial[page] += 1
            if not self._cached(group, page):
                self._dissolve(group, page)
        elif state.refs == 0:
            del self._spare[group][block]
            state.cached = False
            self._open[group][block] = None
        else:
            state.cached = False

    # ---- what is awaited --------------------------------------------------------------------------------------

    def await_return(
        self, owner: Hashable, blocks: Iterable[tuple[int, int]], rank: float = inf, most: int | None = None
    ) -> list[int]:
        """Keep the pages of these blocks, each with its group, as long as others can be given up: `owner` comes back
        for them. Return the pages that are new to it.

        rank: inf, or PINNED. most: so many pages at most, the first ones.
        """
        awaits = self._awaits.setdefault(owner, {})
        pages = dict.fromkeys(self._page_of(group, block) for group, block in blocks if self.is_cached(group, block))
        new = [page for page in pages if owner not in self._awaited.get(page, ())][:most]
        for page in new:
            awaits[page] = None
            self._awaited.setdefault(page, {})[owner] = rank
            self._rank_again(page)
        return new

    def returned(self, owner: Hashable) -> None:
        """The owner is back, or never comes: what it did not take is worth what it would be without it."""
        for page in self._awaits.pop(owner, ()):
            owners = self._awaited.get(page, {})
            if owners.pop(owner, None) is not None:
                if not owners:
                    del self._awaited[page]
                self._rank_again(page)

    def _rank_again(self, page: int) -> None:
        if (group := self._idle.get(page)) is not None:
            self._ranked_of[group].discard(page)
            self._rank(group, page, self._cached(group, page))

    # ---- inside -----------------------------------------------------------------------------------------------

    def _take(self, group: int, scarce: bool, fills: bool) -> int:
        if not self._open[group]:
            if fills and (page := self._to_fill(group)) is not None:
                self._fill(group, page)
            elif scarce and self._spare[group]:
                block = next(iter(self._spare[group]))
                self._on_evict(group, [block])
                self.forget(group, block)
            else:
                return self._cut(group, self._fresh.pop() if self._fresh else self._evict())
        block = next(reversed(self._open[group]))
        self._hold(group, block)
        return block

    def _hold(self, group: int, block: int) -> None:
        """First reference to a block of a busy page, or of a page about to be."""
        del self._unheld(group, block)[block]
        self._blocks[group][block].refs = 1
        self._busy[self._page_of(group, block)] += 1

    def _unheld(self, group: int, block: int) -> OrderedDict[int, None]:
        return self._spare[group] if self._blocks[group][block].cached else self._open[group]

    def _cut(self, group: int, page: int) -> int:
        """Hand a fresh page to the group: its first block is held, the others are open."""
        if self._per_page[group] == 1:
            self._busy[page], self._blocks[group][page] = 1, _Block(1)
            return page
        first, *others = self._blocks_of(group, page)
        self._busy[page] = 1
        self._blocks[group][first] = _Block(refs=1)
        for block in reversed(others):
            self._blocks[group][block] = _Block(refs=0)
            self._open[group][block] = None
        return first

    def _to_fill(self, group: int) -> int | None:
        """Return the idle page that should be filled up next, if there is one that lacks few enough blocks."""
        page = next(reversed(self._partial[group]), None)
        return page if page is not None and self._partial[group][page] >= self._lacking[group] else None

    def _fill(self, group: int, page: int) -> None:
        lacks = self._per_page[group] - self._partial[group][page]
        self._filled[page] = lacks
        self._lacking[group] += lacks
        self._wake(group, page)

    def _lay_down(self, group: int, page: int) -> None:
        """The last held block was released: the page as a whole waits to be found again or evicted."""
        states, cached = self._blocks[group], list[int]()
        for block in self._blocks_of(group, page):
            if states[block].cached:
                cached.append(block)
                del self._spare[group][block]
            else:
                del self._open[group][block]
        self._idle[page] = group
        if self._filled:
            self._lacking[group] -= self._filled.pop(page, 0)
        if 0 < len(cached) < self._per_page[group]:
            self._partial[group][page] = self._per_page[group] - len(cached)
        self._settle_idle(group, page, cached)

    def _settle_idle(self, group: int, page: int, cached: Sequence[int]) -> None:
        """Give a page that became idle its place among those that may be given up, if it has any cached blocks."""
        if not cached:
            return self._dissolve(group, page)
        self._rank(group, page, cached)
        idle = self._ranked[1]
        while len(idle) > self._most_states and (least := idle.least()) is not None:
            self._give_up(least)

    def _rank(self, group: int, page: int, cached: Sequence[int]) -> None:
        """Give an idle page with these cached blocks its place among those that may be given up."""
        self._order += 1
        owners = self._awaited.get(page)
        worth = 0.0 if self._worth is None or owners else self._worth(group, cached)
        rank = max(owners.values()) if owners else self._clock + worth
        self._ranked_of[group].add(Idle(rank, self._order, page))

    def _wake(self, group: int, page: int) -> None:
        """A block of an idle page is about to be held."""
        if self._idle.pop(page, None) is not None:
            self._ranked_of[group].discard(page)
            self._partial[group].pop(page, None)
            for block in self._blocks_of(group, page):
                self._unheld(group, block)[block] = None

    def _evict(self) -> int:
        """Give up the content of the idle page that is worth least."""
        least = self._least()
        assert least is not None
        self._give_up(least)
        return self._fresh.pop()

    def _least(self) -> Idle | None:
        tokens, states = self._ranked[0].least(), self._ranked[1].least()
        return tokens if states is None else states if tokens is None else min(tokens, states)

    def _give_up(self, idle: Idle) -> None:
        page, group = idle.page, self._idle[idle.page]
        if idle.rank < PINNED:
            self._clock = max(self._clock, idle.rank)
        if self._per_page[group] == 1:  # an idle page has content
            self._on_evict(group, [page])
            return self._dissolve(group, page)
        for block in self._blocks_of(group, page):
            state = self._blocks[group][block]
            if state.cached:
                self._on_evict(group, [block])
                state.cached = False
        self._dissolve(group, page)

    def _dissolve(self, group: int, page: int) -> None:
        """Return an idle page without cached blocks to the common stock."""
        if self._per_page[group] == 1:
            del self._blocks[group][page]
        else:
            for block in self._blocks_of(group, page):
                del self._blocks[group][block]
        del self._busy[page], self._idle[page]
        if self._awaited:
            self._awaited.pop(page, None)
        self._ranked_of[group].discard(page)
        self._partial[group].pop(page, None)
        self._fresh.append(page)

    def _cached(self, group: int, page: int) -> list[int]:
        return [block for block in self._blocks_of(group, page) if self._blocks[group][block].cached]

    def _page_of(self, group: int, block: int) -> int:
        return block if self._per_page[group] == 1 else self.layout.page_of(group, block)

    def _blocks_of(self, group: int, page: int) -> list[int]:
        if self._per_page[group] == 1:
            return [page]
        return [self.layout.block_id(group, page, index) for index in range(self._per_page[group])]
