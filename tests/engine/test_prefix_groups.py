"""Groups of rows with common first blocks: what they claim is true, and what is plainly there is found."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.plan.step import PrefixGroup
from ridgeline.engine.prefix_groups import MIN_SAVED, PrefixGroups
from tests.engine.layouts import GROUPS, Groups, layout_of

BLOCK_SIZE = 64
Tables = list[tuple[list[int], ...]]  # per row, per cache group, block ids


def find(tables: Tables, groups: Groups = ((None, 1),)) -> tuple[PrefixGroup, ...]:
    """Rows live in slots of another order, noted with a last block half full; every slot was used before."""
    finder = PrefixGroups(layout_of(groups, BLOCK_SIZE, 99), len(tables))
    slots_R = np.arange(len(tables), dtype=np.int32)[::-1]
    for slot in slots_R:
        finder.note(slot, [[7] * 90] * len(groups), 90 * BLOCK_SIZE)
    for slot, blocks in zip(slots_R, tables, strict=True):
        finder.note(slot, [[*ids, 7] for ids in blocks], len(blocks[0]) * BLOCK_SIZE + BLOCK_SIZE // 2)
    return find_once(finder, slots_R)


def find_once(finder: PrefixGroups, slots_R: np.ndarray) -> tuple[PrefixGroup, ...]:
    groups = finder.find(slots_R)
    assert [(g.rows.tolist(), g.tokens) for g in finder.find(slots_R)] == [(g.rows.tolist(), g.tokens) for g in groups]
    return groups


@st.composite
def tables(draw: st.DrawFn) -> tuple[Groups, Tables]:
    """Rows that branch off one another, block by block, and rows whose ids agree by chance anywhere."""
    groups = draw(st.sampled_from(GROUPS))
    rows: Tables = []
    for _ in range(draw(st.integers(1, 24))):
        branches: bool = draw(st.booleans())
        parent = draw(st.sampled_from(rows)) if rows and branches else tuple([] for _ in groups)
        kept = draw(st.integers(0, 70))
        own = draw(st.lists(st.integers(1, 3), max_size=6))
        row = tuple(ids[:kept] + own for ids in parent)
        if draw(st.booleans()):
            other = draw(st.sampled_from(range(len(groups))))
            row[other][:1] = [9] * len(row[other][:1])
        rows.append(row)
    return groups, rows


@given(tables())
def test_a_groups_rows_share_their_first_blocks_and_these_are_full(drawn: tuple[Groups, Tables]) -> None:
    groups, rows = drawn
    full = [g for g, (window, _) in enumerate(groups) if window is None]
    seen: set[int] = set()
    for group in find(rows, groups):
        members, blocks = group.rows.tolist(), group.tokens // BLOCK_SIZE
        assert full
        assert group.tokens % BLOCK_SIZE == 0
        assert (len(members) - 1) * group.tokens >= MIN_SAVED
        assert members == sorted(set(members))
        assert not seen & set(members)
        seen |= set(members)
        for g in full:
            assert all(rows[row][g][:blocks] == rows[members[0]][g][:blocks] for row in members)
        assert all(len(rows[row][0]) >= blocks for row in members)


@given(
    prefix=st.integers(1, 150),
    tails=st.lists(st.integers(0, 5), min_size=3, max_size=40),
    strangers=st.lists(st.integers(1, 9), max_size=5),
)
def test_one_common_beginning_is_found_whole(prefix: int, tails: list[int], strangers: list[int]) -> None:
    ids = iter(range(1000, 100_000))
    common = [next(ids) for _ in range(prefix)]
    rows: Tables = [([*common, *(next(ids) for _ in range(tail))],) for tail in tails]
    rows += [([next(ids) for _ in range(length)],) for length in strangers]
    [group] = find(rows)
    assert group.rows.tolist() == list(range(len(tails)))
    assert group.tokens == prefix * BLOCK_SIZE


def test_a_short_beginning_of_all_does_not_hide_long_ones_of_some() -> None:
    first, second = list(range(100, 140)), list(range(200, 230))
    rows: Tables = [([1, *(first if row % 2 else second), 300 + row],) for row in range(20)]
    found = [(group.rows.tolist(), group.tokens // BLOCK_SIZE) for group in find(rows)]
    assert found == [(list(range(1, 20, 2)), 41), (list(range(0, 20, 2)), 31)]


def test_one_common_block_is_found_where_nothing_is_shared_halfway_along() -> None:
    """Beside a row that has nothing in common with them."""
    rows: Tables = [(list(range(2, 82)),)]
    rows += [([1, *range(100 * row, 100 * row + 60)],) for row in range(1, 6)]
    assert [(group.rows.tolist(), group.tokens) for group in find(rows)] == [([1, 2, 3, 4, 5], BLOCK_SIZE)]


def test_windows_are_not_looked_at() -> None:
    rows: Tables = [([1, 2, 3], [4, 5, 6]), ([1, 2, 3], [0, 7, 8]), ([1, 2, 3], [0, 0, 9])]
    assert [group.tokens for group in find(rows, ((None, 1), (70, 1)))] == [3 * BLOCK_SIZE]
    assert find(rows, ((70, 1), (90, 1))) == ()


def test_equal_ids_after_a_difference_are_not_shared() -> None:
    rows: Tables = [([1, 2, 3, 4, 5],), ([1, 2, 9, 4, 5],), ([1, 2, 8, 4, 5],)]
    assert [group.tokens for group in find(rows)] == [2 * BLOCK_SIZE]
