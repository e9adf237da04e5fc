"""Rules of routing, each against its own words."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.routing import BLOCK, BYTES, FACTOR, WORTH
from ridgeline.routing import RULES, THEIRS, ServerLoad, rule_of

LOADS = st.dictionaries(st.integers(0, 7), st.builds(ServerLoad, st.integers(0, 9), st.integers(0, 5000)), min_size=1)
IDLE = {replica: ServerLoad(0, 0) for replica in range(4)}


@pytest.mark.parametrize("name", [*RULES, *THEIRS])
@settings(max_examples=50, deadline=None)
@given(asked=st.lists(st.tuples(st.binary(max_size=600), st.sampled_from(["", "x"]), LOADS), max_size=8))
def test_every_rule_chooses_a_replica_that_is_there(
    name: str, asked: list[tuple[bytes, str, dict[int, ServerLoad]]]
) -> None:
    rule = rule_of(name)
    for text, session, loads in asked:
        assert rule.choose(text, "", loads, session=session) in loads


def test_an_unknown_rule_is_named_with_those_that_there_are() -> None:
    with pytest.raises(InvalidConfig, match="unknown routing rule 'fastest'; known: least, prefix, random"):
        rule_of("fastest")


@settings(max_examples=50, deadline=None)
@given(LOADS)
def test_the_least_loaded_replica_has_the_fewest_open_requests(loads: dict[int, ServerLoad]) -> None:
    chosen = rule_of("least").choose(b"", "", loads)
    assert loads[chosen].requests == min(load.requests for load in loads.values())


def test_replicas_of_equal_load_take_turns() -> None:
    for name in ("least", "round-robin", "prefix"):
        rule = rule_of(name)
        assert sorted(rule.choose(b"", "", IDLE) for _ in IDLE) == sorted(IDLE)


def test_round_robin_goes_on_where_a_replica_left() -> None:
    rule = rule_of("round-robin")
    assert [rule.choose(b"", "", IDLE) for _ in range(2)] == [0, 1]
    without = {replica: load for replica, load in IDLE.items() if replica != 2}
    assert [rule.choose(b"", "", without) for _ in range(2)] == [3, 0]


def test_random_draws_come_to_all_and_are_the_same_again() -> None:
    one, other = rule_of("random"), rule_of("random")
    drawn = [one.choose(b"", "", IDLE) for _ in range(400)]
    assert drawn == [other.choose(b"", "", IDLE) for _ in range(400)]
    assert min(Counter(drawn)[replica] for replica in IDLE) > 60  # 100 ± 4.6 standard deviations


def test_a_session_keeps_its_replica_whatever_the_load_and_gets_it_back() -> None:
    rule = rule_of("session")
    homes = {name: rule.choose(b"", "", IDLE, session=name) for name in map(str, range(200))}
    assert min(Counter(homes.values())[replica] for replica in IDLE) > 20  # 50 ± 4.9 standard deviations
    busy = {replica: ServerLoad(99 * (replica == 2), 0) for replica in IDLE}
    left = {replica: load for replica, load in IDLE.items() if replica != 2}
    for name, home in homes.items():
        assert rule.choose(b"", "", busy, session=name) == home
        assert home == 2 or rule_of("session").choose(b"", "", left, session=name) == home
        assert rule.choose(b"", "", IDLE, session=name) == home


def test_sessions_of_two_tenants_with_one_name_are_two() -> None:
    rule = rule_of("session")
    homes = {rule.choose(b"", tenant, IDLE, session="1") for tenant in map(str, range(50))}
    assert homes == set(IDLE)


def test_without_a_session_the_least_loaded_replica_is_chosen() -> None:
    assert rule_of("session").choose(b"", "", {0: ServerLoad(2, 0), 1: ServerLoad(1, 0), 2: ServerLoad(2, 0)}) == 1


def test_a_text_that_goes_on_stays_until_its_replica_has_far_more_to_do() -> None:
    rule, text = rule_of("prefix"), b"a" * BLOCK * BYTES * 10
    home = rule.choose(text, "", IDLE)
    longest = int(WORTH * BLOCK * 10)
    for tokens, stays in ((longest, True), (longest + 1, False)):
        loads = {replica: ServerLoad(1, tokens if replica == home else 0) for replica in IDLE}
        assert (rule.choose(text + b"b" * 40, "", loads) == home) is stays


def test_affinity_yields_where_load_is_uneven() -> None:
    """Of one beginning that all share, no replica gets more than the bound says."""
    rule, tokens = rule_of("prefix"), dict.fromkeys(range(4), 0)
    for number in range(400):
        text = b"a" * BLOCK * BYTES * 2 + b"%08d" % number * 100
        loads = {replica: ServerLoad(0, sent) for replica, sent in tokens.items()}
        tokens[rule.choose(text, "", loads)] += 264
    assert max(tokens.values()) <= FACTOR * min(tokens.values()) + WORTH * 2 * BLOCK + 264


def test_a_replica_that_began_anew_has_nothing() -> None:
    rule, text = rule_of("prefix"), b"a" * 1000
    home = rule.choose(text, "", IDLE)
    rule.forget(home)
    loads = {replica: ServerLoad(1, 1 if replica == home else 0) for replica in IDLE}
    assert rule.choose(text, "", loads) != home
