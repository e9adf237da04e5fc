"""A simulated fleet: every request ends once, no token is lost, and the same seed gives the same figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.request import RequestStats
from ridgeline.core.plan.step import Rows, StepPlan
from ridgeline.kernels.base.cost import StepShape
from ridgeline.routing import RULES
from ridgeline.simulation.device import Device, Known
from ridgeline.simulation.figures import Bounds, Counts
from ridgeline.simulation.fleet import Autoscale, Fleet, FleetSettings, ReplicaFailure
from ridgeline.simulation.traffic import Ask, Listed, Piece
from ridgeline_bench.serving.sessions import Agents
from tests.simulation.fleets import asked, run, setup, small

sizes = st.tuples(st.floats(0, 0.02), st.integers(1, 300), st.integers(1, 60))
SETUP = small()


class Recorded(Counts):
    """Counts that remember which requests ended, and when."""

    def __init__(self, counts: Counts) -> None:
        super().__init__(counts.bounds, 0.0)
        self.ends: Counter[int] = Counter()
        self.output: dict[int, int] = {}
        self.moments: list[float] = []

    def ended(self, ask: Ask, stats: RequestStats, over: int) -> None:
        super().ended(ask, stats, over)
        self.ends[ask.number] += 1
        self.output[ask.number] = stats.output_tokens
        self.moments.append(stats.finished)
        assert ask.at <= stats.arrival <= stats.finished
        assert stats.first_scheduled is not None
        assert stats.first_token is not None
        assert stats.arrival <= stats.first_scheduled < stats.first_token <= stats.finished


@settings(max_examples=12, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=25), st.integers(1, 3), st.sampled_from([*RULES]), st.integers(0, 150))
def test_every_request_ends_once_with_all_its_tokens(
    given_sizes: list[tuple[float, int, int]], replicas: int, routing: str, shared: int
) -> None:
    asks = asked(given_sizes, shared)
    fleet = Fleet(SETUP, FleetSettings(replicas=replicas, routing=routing), Listed(iter(asks)))
    fleet.counts = recorded = Recorded(fleet.counts)
    figures = fleet.run()
    assert recorded.ends == Counter(ask.number for ask in asks)
    assert recorded.output == {ask.number: ask.answer.tokens for ask in asks}
    assert recorded.moments == sorted(recorded.moments)
    assert recorded.output_tokens == sum(ask.answer.tokens for ask in asks)
    assert recorded.prompt_tokens == sum(ask.length for ask in asks)
    assert (figures.requests, figures.completed, figures.failed) == (len(asks), len(asks), 0)
    assert 0 <= figures.hit_rate < 1
    assert 0 <= figures.busy <= 1 + 1e-9


@settings(max_examples=10, deadline=None)
@given(st.lists(sizes, min_size=2, max_size=20), st.randoms(use_true_random=False))
def test_requests_of_one_moment_in_whatever_order_they_are_numbered_take_as_long_together(
    given_sizes: list[tuple[float, int, int]], random: object
) -> None:
    """The figures follow from the order in time alone: numbers, and with them the order of all dicts, are free."""
    asks = asked(given_sizes)
    numbers = list(range(len(asks)))
    random.shuffle(numbers)  # type: ignore[attr-defined]
    others = [
        Ask(number=number, at=ask.at, prompt=(Piece(10 + 2 * number, ask.length),), answer=ask.answer)
        for number, ask in zip(numbers, asks, strict=True)
    ]
    plan = FleetSettings(replicas=2, routing="least")
    assert run(SETUP, asks, plan)[1] == run(SETUP, others, plan)[1]


def test_answers_that_end_before_their_limit_stop_there() -> None:
    asks = [Ask(number=0, at=0.0, prompt=(Piece(1, 30),), answer=Piece(2, 5), limit=100)]
    figures = run(SETUP, asks)[1]
    assert figures.output_rate * figures.duration == pytest.approx(5)


def test_one_request_alone_takes_its_steps_and_nothing_more() -> None:
    replica = setup(max_model_len=2048, lag=0.001)
    figures = run(replica, asked([(0.0, 700, 4)]))[1]
    prompt = replica.times.step_limit(StepShape([700], [700], 1))
    steps = [replica.times.step_limit(StepShape([1], [700 + n], 1)) for n in (1, 2, 3)]
    assert figures.ttft.p50 == pytest.approx(1e3 * (0.001 + prompt))
    assert figures.e2e.p50 == pytest.approx(1e3 * (0.001 + prompt + sum(steps)))
    assert figures.itl.mean == pytest.approx(1e3 * sum(steps) / 3, rel=1e-6)


def test_prompts_that_share_a_beginning_find_it_up_to_the_ideal() -> None:
    asks = [
        Ask(
            number=n,
            at=float(n),
            prompt=(Piece(1, 640), Piece(10 + n, 50)),
            answer=Piece(100 + n, 3),
            seen=640 * (n > 0),
        )
        for n in range(10)
    ]
    figures = run(setup(max_model_len=2048), asks)[1]
    assert figures.ideal_hit_rate == pytest.approx(9 * 640 / 6900)
    assert figures.hit_rate == pytest.approx(figures.ideal_hit_rate)
    without = run(setup(max_model_len=2048, prefix_caching=False), asks)[1]
    assert without.hit_rate == 0
    assert without.ttft.p50 > figures.ttft.p50


def test_a_full_cache_preempts_and_loses_nothing() -> None:
    figures = run(SETUP, asked([(0.0, 200, 200)] * 12))[1]
    assert figures.completed == 12
    assert figures.output_rate * figures.duration == pytest.approx(12 * 200)


def test_the_itl_bound_counts_requests_whose_gaps_are_short() -> None:
    asks = asked([(0.0, 100, 50)] + [(0.004, 300, 5)] * 6)
    easy = run(SETUP, asks, bounds=Bounds(itl=1.0))[1]
    hard = run(SETUP, asks, bounds=Bounds(itl=1e-6))[1]
    assert easy.goodput == pytest.approx(easy.request_rate)
    assert hard.goodput == 0
    assert run(SETUP, asks)[1].goodput is None


def test_a_replica_that_stops_loses_answers_that_had_begun_and_no_others() -> None:
    asks = asked([(0.0, 100, 300)] * 3 + [(0.02, 100, 20)] * 20)
    plan = FleetSettings(replicas=2, routing="round-robin", failures=[ReplicaFailure(replica=0, at=0.05, away=0.1)])
    figures = run(SETUP, asks, plan)[1]
    assert figures.failed >= 1
    assert figures.completed + figures.failed == len(asks)
    assert figures.replica_seconds < 2 * figures.duration


def test_requests_wait_for_the_only_replica_while_it_is_away() -> None:
    plan = FleetSettings(failures=[ReplicaFailure(replica=0, at=0.01, away=5.0)])
    figures = run(SETUP, asked([(0.02, 100, 10)] * 3), plan)[1]
    assert figures.completed == 3
    assert figures.ttft.p50 > 4900


def test_replicas_come_with_the_load_and_leave_after_it() -> None:
    asks = asked([(0.0, 200, 60)] * 60 + [(30.0, 10, 2)] * 3)
    steady = run(SETUP, asks, FleetSettings(replicas=4))[1]
    scaled = run(SETUP, asks, FleetSettings(replicas=4, autoscale=Autoscale(least=1, requests=4, start=0.0)))[1]
    assert scaled.completed == steady.completed == len(asks)
    assert scaled.replica_seconds < 0.6 * steady.replica_seconds


def test_replicas_are_looked_at_only_while_something_happens() -> None:
    """Three requests in centuries, and a replica that is away for as long."""
    sizes, later = [(0.0, 20, 3), (1e10, 20, 3), (1e10, 20, 3)], ReplicaFailure(replica=0, at=1.5e10, away=1e11)
    scale = Autoscale(least=1, requests=1, start=0.0)
    fleet = Fleet(small(), FleetSettings(replicas=1, autoscale=scale, failures=[later]), Listed(iter(asked(sizes))))
    looks, look = 0, fleet._look

    def counted(scale: Autoscale) -> None:
        nonlocal looks
        looks += 1
        look(scale)

    fleet._look = counted  # type: ignore[method-assign]
    assert fleet.run().completed == 3
    assert looks < 30


def test_a_thousand_replicas_of_which_few_are_used_cost_what_these_do() -> None:
    fleet, found = run(small(), asked([(0.0, 20, 3)] * 3), FleetSettings(replicas=1024, routing="round-robin"))
    assert found.completed == 3
    assert sum(replica.steps > 0 for replica in fleet.replicas) == 3


def test_agents_come_home_to_their_prefixes() -> None:
    agents = Agents(sessions=3, turns=5, rate=1.0, time_scale=0.1, seed=1)
    figures = run(setup(), agents)[1]
    again = run(setup(), Agents(sessions=3, turns=5, rate=1.0, time_scale=0.1, seed=1))[1]
    assert figures == again
    assert figures.requests >= 15
    assert figures.hit_rate == pytest.approx(figures.ideal_hit_rate, abs=0.02)
    assert figures.ideal_hit_rate > 0.7


def test_agents_of_published_sizes_have_the_published_prompts() -> None:
    agents = Agents(sessions=20, rate=float("inf"), time_scale=0.0)
    lengths: list[int] = []
    asks: list[Ask] = list(agents.begin())
    turns = Counter[int]()
    seen = total = 0
    while asks:
        ask = asks.pop()
        turns[ask.session] += 1
        seen, total = seen + ask.seen, total + ask.length
        later: Sequence[Ask] = agents.after(ask, ask.at)
        if not later and ask.session < 20:
            lengths.append(ask.length)
        asks += later
    assert {turns[session] for session in range(20)} == {43}
    assert sorted(lengths)[10] == pytest.approx(142_000, rel=0.05)
    assert seen / total > 0.95
    assert 3 <= len(turns) - 20 <= 15  # sub-agents, of 44 % of sessions


def test_mistakes_are_named() -> None:
    with pytest.raises(InvalidConfig, match="unknown scheduling policy 'x'"):
        small(policy="x")
    with pytest.raises(InvalidConfig, match="unknown routing rule 'x'"):
        FleetSettings(routing="x")
    with pytest.raises(InvalidConfig, match="more than the context of 512"):
        run(SETUP, asked([(0.0, 500, 100)]))
    with pytest.raises(InvalidConfig, match="sort them"):
        run(SETUP, [*asked([(1.0, 5, 5)]), Ask(number=9, at=0.5, prompt=(Piece(1, 1),), answer=Piece(2, 1))])
    with pytest.raises(InvalidConfig, match="replica 3 cannot fail"):
        FleetSettings(replicas=2, failures=[ReplicaFailure(replica=3, at=0.0, away=1.0)])
    with pytest.raises(InvalidConfig, match="remain for the KV cache"):
        setup("llama-70b", "RTX-4090")


class PlainDevice(Device):
    """A device that looks at every row of every step."""

    def _seconds(self, plan: StepPlan) -> float:
        twice = sum((len(group.rows) - 1) * group.tokens for group in plan.rows.prefixes)
        return self._times.seconds(plan.shape(), twice)

    def _about(self, rows: Rows, kv_len_R: np.ndarray) -> Known:
        return super()._about(rows, kv_len_R)._replace(quiet_until=0)


@pytest.mark.parametrize("tokens", [1024, 4096])  # the smaller one preempts
def test_what_is_known_of_rows_that_stay_changes_no_figure(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    asks = asked([(0.003 * (n % 5), 20 + 37 * n % 200, 1 + 53 * n % 150) for n in range(60)], shared=40)
    asks = [replace(ask, limit=ask.answer.tokens + 20 * (ask.number % 3)) for ask in asks]  # some stop by themselves
    found = [run(small(kv_tokens=tokens), asks, bounds=Bounds(itl=0.002))[1]]
    monkeypatch.setattr("ridgeline.simulation.setup.Device", PlainDevice)
    found.append(run(small(kv_tokens=tokens), asks, bounds=Bounds(itl=0.002))[1])
    assert found[0] == found[1]
    assert bool(found[0].preemptions) == (tokens == 1024)
