"""Where experts and their copies lie, compared with every possible arrangement of small cases."""

from __future__ import annotations

from functools import cache
from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.perf.experts import imbalance
from ridgeline.perf.placement import copies, equal_parts, placed, rank_loads


def best(tokens_E: tuple[int, ...], ranks: int, slots: int) -> float:
    """The least that the busiest rank can get, by trying all arrangements."""
    experts = range(len(tokens_E))
    each = list(combinations_with_replacement(experts, slots))

    @cache
    def least(rank: int, held: tuple[tuple[int, ...], ...]) -> float:
        if rank == ranks:
            if {e for own in held for e in own} != set(experts):
                return float("inf")
            return float(rank_loads(tokens_E, held).max())
        start = each.index(held[-1]) if held else 0  # ranks are alike, so they come in order
        return min(least(rank + 1, (*held, own)) for own in each[start:])

    return least(0, ())


CASES = [
    (loads, ranks, slots)
    for loads, (ranks, slots) in product(
        [(9, 1, 1, 1), (5, 4, 3, 3), (7, 7, 1, 0), (100, 60, 50, 1), (1, 1, 1, 1), (0, 0, 0, 0), (8, 7, 6, 5)],
        [(2, 2), (2, 3), (3, 2), (2, 4)],
    )
] + [((6, 5, 4, 3, 3, 3), 2, 3), ((6, 5, 4, 3, 3, 3), 2, 4), ((40, 9, 8, 3, 2, 1), 3, 2)]


@pytest.mark.parametrize(("tokens_E", "ranks", "slots"), CASES)
def test_the_busiest_rank_has_little_more_than_it_must(tokens_E: tuple[int, ...], ranks: int, slots: int) -> None:
    held = placed(tokens_E, ranks, slots)
    assert [len(own) for own in held] == [slots] * ranks
    assert {e for own in held for e in own} == set(range(len(tokens_E)))
    got = rank_loads(tokens_E, held)
    assert got.sum() == pytest.approx(sum(tokens_E))
    # Longest first is within 4/3 of the best (Graham), and swaps only lower it
    assert got.max() <= best(tokens_E, ranks, slots) * 4 / 3 + 1e-9


def test_in_most_cases_it_is_the_best() -> None:
    exact = [rank_loads(t, placed(t, r, s)).max() <= best(t, r, s) * 1.001 for t, r, s in CASES]
    assert np.mean(exact) > 0.7


def test_copies_go_to_who_has_most_and_never_beyond_the_ranks() -> None:
    assert copies(np.array([90.0, 30, 10, 10]), 4, 6) == [3, 1, 1, 1]
    assert copies(np.array([90.0, 30, 10, 10]), 2, 6) == [2, 2, 1, 1]
    held = placed([90, 30, 10, 10], 2, 3)
    assert all(len(set(own)) == 3 for own in held)


@given(st.data(), st.integers(2, 8), st.integers(1, 6))
def test_no_rank_has_two_copies_of_an_expert(data: st.DataObject, ranks: int, slots: int) -> None:
    experts = data.draw(st.integers(slots, ranks * slots))
    held = placed(data.draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts)), ranks, slots)
    assert all(len(set(own)) == slots for own in held)


def test_not_even_where_all_other_ranks_are_full() -> None:
    held = placed([13, 7 * 10**18, 17, 0, 284_358_781_168_490, 11], 8, 4)
    assert all(len(set(own)) == 4 for own in held)


def test_a_skewed_load_is_evened_out() -> None:
    """A load as Zipf's law has it, on 8 ranks of 16 experts each."""
    tokens_E = [1000 / (1 + rank) for rank in range(128)]
    before = imbalance(rank_loads(tokens_E, equal_parts(128, 8)))
    assert before > 4
    assert imbalance(rank_loads(tokens_E, placed(tokens_E, 8, 16))) < 1.7  # an expert alone has 1.47
    assert imbalance(rank_loads(tokens_E, placed(tokens_E, 8, 18))) < 1.01


def test_there_must_be_room_for_every_expert() -> None:
    with pytest.raises(ValueError, match="no room for 5 experts"):
        placed([1] * 5, 2, 2)
