"""The way from one placement of experts to another: no order is long, and behind each every expert lies somewhere."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.perf.moves import Takes, near, takes
from ridgeline.perf.placement import RankExperts, equal_parts, placed


def after(held: RankExperts, order: Takes) -> RankExperts:
    """The placement behind an order, as ranks make it: all slots at once."""
    before = [expert for own in held for expert in own]
    now = list(before)
    for slot, source in order:
        now[slot] = before[source]
    size = len(held[0])
    return tuple(tuple(now[first : first + size]) for first in range(0, len(now), size))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[RankExperts, RankExperts]:
    """Two placements by any loads, the second by another one."""
    ranks, slots = draw(st.integers(2, 5)), draw(st.integers(1, 5))
    experts = draw(st.integers(1, ranks * slots))
    loads = st.lists(st.integers(0, 100), min_size=experts, max_size=experts)
    one, other = (placed(draw(loads), ranks, slots) for _ in range(2))
    order = draw(st.permutations(range(ranks)))
    return one, tuple(other[rank] for rank in order)


@given(pairs(), st.integers(2, 9))
def test_every_expert_lies_somewhere_all_the_way(placements: tuple[RankExperts, RankExperts], most: int) -> None:
    held, wanted = placements
    wanted = near(held, wanted)
    everybody = {expert for own in held for expert in own}
    for order in takes(held, wanted, most):
        assert 0 < len(order) <= most
        held = after(held, order)
        count = Counter(expert for own in held for expert in own)
        assert set(count) == everybody
        assert max(count.values()) <= len(held) or len(held[0]) > len(everybody)  # tables have a place for each rank
    assert held == wanted


@given(pairs())
def test_ranks_get_the_wanted_parts(placements: tuple[RankExperts, RankExperts]) -> None:
    held, wanted = placements
    got = near(held, wanted)
    assert sorted(sorted(own) for own in got) == sorted(sorted(own) for own in wanted)


@given(pairs())
def test_who_is_there_already_stays(placements: tuple[RankExperts, RankExperts]) -> None:
    held, _ = placements
    assert near(held, held) == held
    assert near(held, held[::-1]) == held
    assert list(takes(held, held, 2)) == []


@pytest.mark.parametrize(
    ("held", "wanted", "changed"),
    [
        (((0, 1), (2, 3)), ((0, 2), (1, 3)), 2),  # a swap
        (((0, 1, 2), (0, 3, 4)), ((0, 1, 2), (1, 3, 4)), 1),  # a copy of another expert
        (((0, 1, 2), (3, 4, 5)), ((0, 1, 3), (2, 4, 5)), 2),
    ],
)
def test_no_more_slots_change_than_must(held: RankExperts, wanted: RankExperts, changed: int) -> None:
    assert sum(len(order) for order in takes(held, near(held, wanted), 8)) == changed


def test_a_move_of_all_is_cut() -> None:
    held, wanted = equal_parts(16, 2), (tuple(range(0, 16, 2)), tuple(range(1, 16, 2)))
    orders = list(takes(held, near(held, wanted), 3))
    assert len(orders) == 4  # of two slots each, since a swap is not cut
    assert {len(order) for order in orders} == {2}
