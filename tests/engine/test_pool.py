"""The block pool against a model so plain that it is evidently right."""

from __future__ import annotations

import time
from collections.abc import Collection

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ridgeline.core.specs.cache_layout import NULL_BLOCK
from ridgeline.engine.cache.plain_pool import pool_of
from tests.engine.layouts import GROUPS, layout_of
from tests.engine.profiles import machine_settings

Block = tuple[int, int]  # (group, block id)


class PoolMachine(RuleBasedStateMachine):
    """The model: who holds each block how often, and what is cached. Memory units tell whether blocks overlap."""

    @initialize(groups=st.sampled_from(GROUPS), num_pages=st.sampled_from([2, 3, 3, 4, 4, 5, 9]))
    def start(self, groups, num_pages) -> None:
        self.layout = layout_of(groups, 1, num_pages)
        self.evicted: list[Block] = []
        self.pool = pool_of(self.layout, on_evict=lambda g, blocks: self.evicted.extend((g, block) for block in blocks))
        self.held: dict[Block, int] = {}
        self.cached: dict[Block, None] = {}
        self.freed_at: dict[int, int] = {}  # page → when its last held block was freed
        self.last_plan: dict[int, int] = {}  # page → newest plan named at a release
        self.clock = 0
        self.lacked: dict[int, tuple[int, int]] = {}  # page that is filled up → its group, and the blocks it lacked

    def words(self, block: Block) -> set[int]:
        """The memory of the block's layers, in words of four bytes."""
        g, first = block
        layout, found = self.layout, set[int]()
        for layer in range(len(layout.groups[g].layers)):
            start = (first + layer * layout.layer_step(g)) % layout.ids_per_slab[g] * layout.step_bytes[g]
            start += (first // layout.ids_per_slab[g] + layer * layout.num_pages) * layout.slab_bytes
            found.update(range(start // 4, (start + layout.unit_bytes[g]) // 4))
        return found

    def busy_pages(self) -> set[int]:
        return {self.layout.page_of(group, block) for group, block in self.held}

    def pages_short(self, wanted: list[int], held: Collection[Block]) -> int:
        """Pages needed beyond the free ones while `held` are held, counted block by block."""
        pages = 0
        for g, count in enumerate(wanted):
            mine = {self.layout.page_of(group, block) for group, block in held if group == g}
            reusable = len(mine) * self.layout.blocks_per_page(g) - sum(group == g for group, _ in held)
            pages += -(-max(0, count - reusable) // self.layout.blocks_per_page(g))
        return pages - (self.pool.num_pages - len({self.layout.page_of(group, block) for group, block in held}))

    # ---- rules ------------------------------------------------------------------------------------------------

    @rule(data=st.data(), fill=st.sampled_from([True, True, False]))
    def take(self, data, fill) -> None:
        wanted = [data.draw(st.sampled_from([0, 1, 1, 2, 5])) for _ in self.layout.groups]
        fits = self.pages_short(wanted, self.held) <= 0
        before, busy, short = dict(self.freed_at), self.busy_pages(), self.pages_to_cut(wanted)
        assert self.pool.can_take(wanted) == fits
        self.evicted.clear()
        taken = self.pool.take(wanted, fill=fill)
        assert (taken is not None) == fits, "can_take promised something else"
        self.check_eviction_order(before, {self.layout.page_of(g, b) for g, own in enumerate(taken or []) for b in own})
        for g, blocks in enumerate(taken or []):
            assert len(blocks) == wanted[g]
            for block in blocks:
                assert (g, block) not in self.held
                assert (g, block) not in self.cached, "its content was not given up first"
                self.held[g, block] = 1
        for g, block in self.cached:
            page = self.layout.page_of(g, block)
            if page in self.busy_pages() - busy:
                self.lacked[page] = g, self.lacked.get(page, (g, 0))[1] + 1
        for g, least in enumerate(short if taken is not None else ()):
            pages = {self.layout.page_of(g, block) for block in (taken or [])[g]} - busy
            lacked = [count for page, (group, count) in self.lacked.items() if group == g]
            assert sum(lacked) <= self.layout.blocks_per_page(g)
            assert len(pages) <= least + (fill and any(page in self.lacked for page in pages))

    def pages_to_cut(self, wanted: list[int]) -> list[int]:
        """Pages that each group would cut for `wanted` blocks if it gave nothing up."""
        pages = []
        for g, count in enumerate(wanted):
            per_page = self.layout.blocks_per_page(g)
            mine = {self.layout.page_of(group, block) for group, block in self.held if group == g}
            known = {block for block in {*self.held, *self.cached} if block[0] == g}
            reusable = len(mine) * per_page - sum(self.layout.page_of(*block) in mine for block in known)
            pages.append(-(-max(0, count - reusable) // per_page))
        return pages

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def ask_what_could_be_taken_after_a_release(self, data) -> None:
        """Of any references, to the same block too."""
        wanted = [data.draw(st.sampled_from([0, 1, 2, 3, 5])) for _ in self.layout.groups]
        given = {block: data.draw(st.integers(0, refs)) for block, refs in sorted(self.held.items())}
        left = [block for block, refs in self.held.items() if given[block] < refs]
        freed = [
            [block for (group, block), count in given.items() if group == g for _ in range(count)]
            for g in range(len(wanted))
        ]
        assert self.pool.can_take(wanted, freed) == (self.pages_short(wanted, left) <= 0)

    def check_eviction_order(self, freed_at: dict[int, int], taken: set[int]) -> None:
        """taken: pages of the blocks that were taken. One that is filled up is kept, however old."""
        for block in self.evicted:
            assert block in self.cached
            assert block not in self.held, "a held block lost its content"
            del self.cached[block]
        idle = [page for page in freed_at if page not in self.busy_pages()]
        gone = {self.layout.page_of(group, block) for group, block in self.evicted} & set(idle)
        kept = ({self.layout.page_of(group, block) for group, block in self.cached} & set(idle)) - taken
        if gone and kept:
            assert max(freed_at[page] for page in gone) < min(freed_at[page] for page in kept), "not the oldest first"

    @precondition(lambda self: self.held)
    @rule(data=st.data(), plan=st.integers(1, 9))
    def release(self, data, plan) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.release(*block, plan)
        page = self.layout.page_of(*block)
        self.last_plan[page] = max(self.last_plan.get(page, 0), plan)
        self.held[block] -= 1
        if not self.held[block]:
            del self.held[block]
            assert not self.pool.is_quiet(*block, plan - 1), "a plan in flight may still name it"
            if page not in self.busy_pages():
                self.clock += 1
                self.freed_at[page] = self.clock
                self.lacked.pop(page, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def cache_and_release(self, data) -> None:
        self.mark_cached(data)
        self.release(data, 3)

    @precondition(lambda self: self.held or self.cached)
    @rule(data=st.data())
    def share(self, data) -> None:
        block = data.draw(st.sampled_from(sorted({*self.held, *self.cached})))
        self.pool.share(*block)
        self.held[block] = self.held.get(block, 0) + 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def mark_cached(self, data) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.mark_cached(*block)
        self.cached[block] = None

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def forget(self, data) -> None:
        block = data.draw(st.sampled_from(sorted(self.cached)))
        self.pool.forget(*block)
        del self.cached[block]

    @precondition(lambda self: hasattr(self, "pool") and not self.held)
    @rule(data=st.data())
    def an_unheld_pool_gives_every_page_to_any_group(self, data) -> None:
        g = data.draw(st.sampled_from(range(len(self.layout.groups))))
        wanted = [0] * len(self.layout.groups)
        wanted[g] = self.pool.num_pages * self.layout.blocks_per_page(g)
        taken = self.pool.take(wanted)
        assert taken is not None
        for block in taken[g]:
            self.pool.release(g, block, 0)
        self.cached.clear()
        assert self.pool.free_pages == self.pool.num_pages

    # ---- invariants -------------------------------------------------------------------------------------------

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.free_pages == self.pool.num_pages - len(self.busy_pages())
        for g in range(len(self.layout.groups)):
            for page in range(1, self.layout.num_pages):
                for index in range(self.layout.blocks_per_page(g)):
                    block = g, self.layout.block_id(g, page, index)
                    assert self.pool.refs(*block) == self.held.get(block, 0)
                    assert self.pool.is_cached(*block) == (block in self.cached)
                    quiet = block not in self.held and self.last_plan.get(page, 0) <= 5
                    assert self.pool.is_quiet(*block, 5) == quiet

    @invariant()
    def no_memory_belongs_to_two(self) -> None:
        if hasattr(self, "pool"):
            units = [word for block in {*self.held, *self.cached} for word in self.words(block)]
            assert len(units) == len(set(units))
            assert NULL_BLOCK not in units


TestPool = PoolMachine.TestCase
TestPool.settings = machine_settings(examples=75, steps=50)


def test_releasing_what_nobody_holds_is_refused() -> None:
    pool = pool_of(layout_of(((None, 1),), 16, 4))
    [[block]] = pool.take([1]) or []
    pool.release(0, block, 1)
    with pytest.raises((AssertionError, KeyError)):
        pool.release(0, block, 1)


def test_single_blocks_are_evicted_in_the_order_they_were_freed_and_a_hit_renews() -> None:
    evicted: list[int] = []
    pool = pool_of(layout_of(((None, 1),), 16, 5), on_evict=lambda g, blocks: evicted.extend(blocks))
    [blocks] = pool.take([4]) or []
    for block in blocks:
        pool.mark_cached(0, block)
    for block in (blocks[2], blocks[0], blocks[3], blocks[1]):
        pool.release(0, block, 1)
    pool.share(0, blocks[2])
    pool.release(0, blocks[2], 1)
    pool.take([4])
    assert evicted == [blocks[0], blocks[3], blocks[1], blocks[2]]


def test_content_is_given_up_only_when_a_page_more_would_not_do() -> None:
    """Group 0 has two blocks per page, group 1 one. Cached content in a half used page survives while pages are free,
    and makes room when the other group needs the last page."""
    evicted: list[Block] = []
    pool = pool_of(
        layout_of(((None, 1), (4, 2)), 16, 4), on_evict=lambda g, blocks: evicted.extend((g, block) for block in blocks)
    )
    [[held, spare], _] = pool.take([2, 0]) or []
    pool.mark_cached(0, spare)
    pool.release(0, spare, 0)
    [[other], _] = pool.take([1, 0]) or []
    assert evicted == []
    assert pool.layout.page_of(0, other) != pool.layout.page_of(0, held)
    pool.release(0, other, 0)
    assert pool.free_pages == 2
    assert pool.can_take([1, 2])
    assert not pool.can_take([2, 2])
    assert pool.take([1, 2]) is not None
    assert evicted == [(0, spare)]


@pytest.mark.parametrize("groups", [((None, 1),), ((None, 1), (4, 3))])
def test_operations_cost_the_same_in_a_pool_a_hundred_times_as_large(groups) -> None:
    """A scan over the blocks would show as a factor of a hundred; ten allows for a busy machine."""
    small, large = (_seconds_per_round(groups, num_pages) for num_pages in (1_000, 100_000))
    assert large < 10 * small


def _seconds_per_round(groups, num_pages: int) -> float:
    """Take, publish, release, find again and evict, in a pool whose every block is cached."""
    pool = pool_of(layout_of(groups, 16, num_pages))
    last = len(groups) - 1
    wanted = [0] * last + [(num_pages - 1) * pool.layout.blocks_per_page(last)]
    blocks = (pool.take(wanted) or [])[last]
    for block in blocks:
        pool.mark_cached(last, block)
        pool.release(last, block, 1)
    times = []
    for _ in range(300):
        start = time.perf_counter()
        taken = pool.take([2] * len(groups)) or []
        for g, found in enumerate(taken):
            for block in found:
                pool.mark_cached(g, block)
                pool.share(g, block)
                pool.release(g, block, 1)
                pool.release(g, block, 1)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]
