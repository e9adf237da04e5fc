"""Split pools: prompts run on some replicas, their keys and values travel, and others write the answers."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import InvalidConfig
from ridgeline.routing import RULES
from ridgeline.simulation.fleet import Autoscale, Fleet, FleetSettings, ReplicaFailure
from ridgeline.simulation.handover import block_bytes
from ridgeline.simulation.traffic import Ask, Listed, Piece
from tests.simulation.fleets import asked, run, setup, small
from tests.simulation.test_fleet import Recorded, sizes

SETUP = small()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(sizes, min_size=1, max_size=25),
    st.tuples(st.integers(1, 2), st.integers(1, 2)),
    st.sampled_from([*RULES]),
    st.integers(0, 150),
    st.sampled_from([1e6, 50e9]),
)
def test_every_request_ends_once_with_all_its_tokens(
    given_sizes: list[tuple[float, int, int]], pools: tuple[int, int], routing: str, shared: int, rate: float
) -> None:
    asks = asked(given_sizes, shared)
    plan = FleetSettings(replicas=sum(pools), prefill=pools[0], routing=routing, handover_rate=rate)
    fleet = Fleet(SETUP, plan, Listed(iter(asks)))
    fleet.counts = recorded = Recorded(fleet.counts)
    figures = fleet.run()
    assert recorded.ends == Counter(ask.number for ask in asks)
    assert recorded.output == {ask.number: ask.answer.tokens for ask in asks}
    assert recorded.prompt_tokens == sum(ask.length for ask in asks)
    assert (figures.requests, figures.completed, figures.failed) == (len(asks), len(asks), 0)
    assert not fleet._whole
    assert not fleet._handovers


def one(length: int = 8192, answer: int = 100) -> Ask:
    return Ask(number=1, at=0.0, prompt=(Piece(10, length),), answer=Piece(11, answer))


def test_a_request_alone_takes_its_prompt_its_journey_and_its_answer() -> None:
    large, rate = setup(max_model_len=16384, lag=0.0), 1e9
    _, whole = run(large, [one()])
    _, split = run(large, [one()], FleetSettings(replicas=2, prefill=1, handover_rate=rate))
    journey = 8192 // large.layout.block_size * block_bytes(large.layout) / rate
    assert split.ttft.p50 > whole.ttft.p50 + 1e3 * journey
    assert split.ttft.p50 < whole.ttft.p50 + 1e3 * journey + 10, "the other runs the last block's tokens alone"
    assert split.itl.p50 == pytest.approx(whole.itl.p50, rel=0.01)


def test_prompts_no_longer_hold_up_those_that_decode() -> None:
    """Long prompts beside answers: the gaps of these follow from the decoding alone."""
    large = setup(max_model_len=16384, lag=0.0, itl_target=0.0)
    answers = [Ask(number=n, at=0.0, prompt=(Piece(10 + n, 64),), answer=Piece(500 + n, 400)) for n in range(8)]
    prompts = [
        Ask(number=100 + n, at=0.01 * n, prompt=(Piece(900 + n, 6000),), answer=Piece(950, 2)) for n in range(40)
    ]
    asks = sorted([*answers, *prompts], key=lambda ask: ask.at)
    _, both = run(large, asks, FleetSettings(replicas=2))
    _, split = run(large, asks, FleetSettings(replicas=2, prefill=1))
    assert split.itl.p99 < both.itl.p99 / 5


def test_what_the_other_has_does_not_travel_again() -> None:
    large = setup(max_model_len=16384, lag=0.0)
    turns = [
        Ask(number=n, at=10.0 * n, prompt=(Piece(10, 8192), Piece(20 + n, 64)), answer=Piece(30 + n, 5))
        for n in range(2)
    ]
    fleet, _ = run(large, turns, FleetSettings(replicas=2, prefill=1, handover_rate=1e9))
    apart, figures = run(large, turns[:1], FleetSettings(replicas=2, prefill=1, handover_rate=1e9))
    first = apart._sends_until[0] - 0.0
    assert fleet._sends_until[0] - 10.0 < first / 2
    assert figures.completed == 1


def test_a_replica_that_answers_and_stops_loses_what_it_has_begun_alone() -> None:
    asks = asked([(0.0, 200, 400 - 200)] * 1 + [(0.001, 100, 100)] * 6)
    failures = [ReplicaFailure(replica=1, at=0.05, away=0.5), ReplicaFailure(replica=0, at=0.2, away=0.1)]
    fleet, figures = run(SETUP, asks, FleetSettings(replicas=3, prefill=1, failures=failures))
    assert figures.completed + figures.failed == len(asks)
    assert not fleet._whole


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"replicas": 2, "prefill": 2}, "2 of 2 replicas cannot run prompts alone"),
        ({"replicas": 3, "prefill": 1, "autoscale": Autoscale(least=1, requests=2)}, "leave autoscaling out"),
        ({"replicas": 2, "prefill": 1, "handover_rate": 0.0}, "the rate of handovers must be above 0"),
    ],
)
def test_a_mistake_is_one_sentence(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidConfig, match=sentence):
        FleetSettings(**fields)  # type: ignore[arg-type]


def test_a_model_whose_blocks_are_not_all_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="all attend to all tokens"):
        run(setup("mamba2-2.7b", max_model_len=16384, lag=0.0), [one()], FleetSettings(replicas=2, prefill=1))
