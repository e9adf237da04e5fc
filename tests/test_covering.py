"""The design that chooses few cases of many has every pair."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.covering import by_pairs, by_values


@pytest.mark.parametrize("sizes", [(1,), (4, 3), (2, 2, 2), (3, 7, 6), (2, 4, 3, 2)], ids=str)
def test_every_pair_of_values_is_in_a_case_that_always_runs(sizes: tuple[int, ...]) -> None:
    """And every case is in some run. Values need no hash."""
    values = [[[place, n] for n in range(size)] for place, size in enumerate(sizes)]
    cases = by_pairs(*values)
    assert [[*case.values] for case in cases] == [[*case] for case in product(*values)]
    often = [case.values for case in cases if not case.marks]
    for one, other in combinations(range(len(sizes)), 2):
        assert all(
            any(case[one] == a and case[other] == b for case in often) for a in values[one] for b in values[other]
        )
    assert len(often) < len(cases) or len(sizes) < 3


def test_cases_that_there_are_not_are_left_out() -> None:
    cases = [
        (*case.values, bool(case.marks))
        for case in by_pairs("ab", [1, 2], [5, 6], where=lambda a, b, c: a != "b" or b == 1)
    ]
    assert len(cases) == 6
    assert {case[:2] for case in cases if not case[3]} == {("a", 1), ("a", 2), ("b", 1)}
    assert sum(not thorough for *_, thorough in cases) < 6


def test_one_parameter_or_two_have_all_their_values() -> None:
    assert not any(case.marks for case in by_pairs([1, 2], "abc"))


@pytest.mark.parametrize("turn", [0, 1])
def test_every_value_is_in_a_case_that_always_runs(turn: int) -> None:
    cases = by_values("abc", [1, 2], turn=turn)
    assert [case.values for case in cases] == [*product("abc", [1, 2])]
    often = [case.values for case in cases if not case.marks]
    assert len(often) == 3
    assert {first for first, _ in often} == set("abc")
    assert {second for _, second in often} == {1, 2}


def test_turns_differ_until_all_pairs_are_there() -> None:
    often = [{case.values for case in by_values("ab", [1, 2], turn=turn) if not case.marks} for turn in (0, 1)]
    assert often[0].isdisjoint(often[1])
    assert often[0] | often[1] == {*product("ab", [1, 2])}
