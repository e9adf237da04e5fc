"""Who comes first in policy order gets budget, slots and blocks first; who outranks others takes theirs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from ridgeline.core.plan.request import BACKGROUND, Preemption, Request, RequestStats
from ridgeline.engine.policy.fcfs import FCFS
from ridgeline.engine.policy.ranked import MOST_OWNERS
from ridgeline.engine.scheduler import Scheduler
from ridgeline.engine.sequence import Sequence, Status
from tests.engine.desk import Desk, make_request
from tests.engine.ideal_worker import IdealWorker

LONG = tuple(1 + n * n % 3 for n in range(40))
SHORT = (3, 2, 1)


def desk_of(policy: str = "priority", **settings: int) -> Desk:
    desk = Desk(**settings)
    config = replace(desk.scheduler.config, scheduling_policy=policy)
    desk.scheduler = Scheduler(config, desk.layout)
    desk.worker = IdealWorker(desk.layout)
    return desk


def ranked(name: str, prompt: tuple[int, ...], priority: int, **params: int) -> Request:
    return replace(make_request(name, prompt, **params), priority=priority)


def plans_until_token(desk: Desk, name: str) -> int:
    for count in range(1, 200):
        desk.submit()
        desk.deliver()
        if desk.got[name]:
            return count
    raise AssertionError(f"{name} got no token")


def test_a_higher_priority_goes_before_the_rest_of_a_lower_ones_prompt() -> None:
    desk = desk_of(budget=4)
    desk.add(low := ranked("low", LONG, 10))
    desk.submit(), desk.deliver()
    desk.add(high := ranked("high", SHORT, -10))
    assert plans_until_token(desk, "high") == 1
    desk.finish()
    assert desk.got == {"low": desk.alone(low), "high": desk.alone(high)}


@pytest.mark.parametrize("lows", [1, 2, 3])
def test_a_higher_priority_takes_the_slot_of_the_last_of_the_lower_ones(lows: int) -> None:
    desk = desk_of(slots=lows)
    ended: dict[str, RequestStats] = {}
    desk.scheduler.on_finish = lambda request, stats: ended.update({request.id: stats})
    requests = [ranked(f"low {n}", (*SHORT, n), 10, max_tokens=30) for n in range(lows)]
    desk.add(*requests)
    desk.submit(), desk.deliver()
    desk.add(high := ranked("high", SHORT, -10))
    assert plans_until_token(desk, "high") == 1
    desk.finish()
    assert desk.got == {request.id: desk.alone(request) for request in [*requests, high]}
    assert {name: stats.preemptions for name, stats in ended.items() if stats.preemptions} == {f"low {lows - 1}": 1}
    assert ended[f"low {lows - 1}"].preempted_for == {Preemption.PRIORITY: 1}
    assert desk.scheduler.preemptions == {Preemption.PRIORITY: 1}


def test_a_higher_priority_takes_blocks_of_as_many_lower_ones_as_it_needs() -> None:
    """32 blocks of four, of which each of three lower ones holds nine. The higher one needs 14 and one to spare for
    each that stays."""
    desk = desk_of(pages=33, slots=4, budget=128)
    requests = [ranked(f"low {n}", (*LONG[:32], n), 10, max_tokens=3) for n in range(3)]
    requests = [replace(request, cache_salt=request.id) for request in requests]
    desk.add(*requests)
    desk.submit(), desk.deliver()
    desk.add(high := ranked("high", (*LONG, *SHORT * 4), -10, max_tokens=1))
    assert plans_until_token(desk, "high") == 1
    assert desk.scheduler.preemptions == {Preemption.PRIORITY: 2}
    assert "low 0" in {seq.id for seq in desk.scheduler.running.leaders()}
    desk.finish()
    assert desk.got == {request.id: desk.alone(request) for request in [*requests, high]}


def test_nobody_is_preempted_for_a_request_that_could_not_start_even_so() -> None:
    """The other one of its own rank keeps its blocks, and what the lower one holds is too little."""
    desk = desk_of(pages=17, slots=4)
    own = [ranked("high 0", LONG[:36], -10, max_tokens=8), ranked("low", SHORT, 10, max_tokens=20)]
    desk.add(*own)
    desk.submit(), desk.deliver()
    desk.add(second := replace(ranked("high 1", LONG[:36], -10, max_tokens=4), cache_salt="its own"))
    desk.submit(), desk.deliver()
    assert desk.scheduler.preemptions.total() == 0
    desk.finish()
    assert desk.got == {request.id: desk.alone(request) for request in [*own, second]}


@pytest.mark.usefixtures("crowded")
def test_who_cannot_start_is_not_looked_at_in_every_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look searches the cache for the whole prompt. The next look comes at once when a request has ended."""
    desk = desk_of(pages=17, slots=4)
    own = [ranked("high 0", LONG[:36], -10, max_tokens=4), ranked("low", LONG[20:37], 10, max_tokens=20)]
    desk.add(*own)
    desk.submit(), desk.deliver()
    desk.add(second := replace(ranked("high 1", LONG[:40], -10, max_tokens=4), cache_salt="its own"))
    looks: list[object] = []
    would_admit = desk.scheduler.cache.would_admit
    monkeypatch.setattr(desk.scheduler.cache, "would_admit", lambda *a, **k: looks.append(a) or would_admit(*a, **k))
    while "high 0" not in desk.ended:
        desk.submit(), desk.deliver()
    assert len(looks) == 1
    desk.submit(), desk.deliver()
    assert desk.got["high 1"], "it takes the place of the lower one as soon as there is one"
    assert desk.scheduler.preemptions == {Preemption.PRIORITY: 1}
    desk.finish()
    assert desk.got == {request.id: desk.alone(request) for request in [*own, second]}


@pytest.mark.parametrize(("policy", "priorities"), [("fcfs", (10, -10)), ("priority", (5, 5)), ("priority", (-1, 5))])
def test_nobody_is_preempted_for_who_does_not_outrank_it(policy: str, priorities: tuple[int, int]) -> None:
    desk = desk_of(policy, slots=1)
    requests = [ranked(name, SHORT, priority) for name, priority in zip("ab", priorities, strict=True)]
    desk.add(*requests)
    desk.finish()
    assert desk.scheduler.preemptions.total() == 0
    assert desk.got == {request.id: desk.alone(request) for request in requests}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.usefixtures("crowded")
def test_for_want_of_blocks_the_last_in_order_gives_way(policy: str) -> None:
    """Nine blocks: both grow to six."""
    desk = desk_of(policy, pages=10)
    ended: dict[str, RequestStats] = {}
    desk.scheduler.on_finish = lambda request, stats: ended.update({request.id: stats})
    first, last = ("a", "b") if policy == "fcfs" else ("b", "a")
    requests = [ranked("a", SHORT, 1, max_tokens=20), ranked("b", (*SHORT, 1), 0, max_tokens=20)]
    desk.add(*requests)
    desk.finish()
    assert ended[first].preemptions == 0
    assert ended[last].preempted_for == {Preemption.BLOCKS: ended[last].preemptions}
    assert ended[last].preemptions > 0
    assert desk.got == {request.id: desk.alone(request) for request in requests}


@pytest.mark.usefixtures("crowded")
def test_who_gave_way_to_others_finds_its_beginning_in_the_cache() -> None:
    """Nine blocks: both grow to six. Only a request that is short of blocks alone has to do without the cache."""
    desk = desk_of("fcfs", pages=10)
    desk.add(make_request("a", SHORT, max_tokens=20), last := make_request("b", (*SHORT, 1), max_tokens=20))
    seq = desk.scheduler._by_id["b"]
    while not seq.preemptions or seq.status is not Status.RUNNING:
        desk.submit(), desk.deliver()
    assert seq.cached_tokens >= 4
    desk.finish()
    assert desk.got["b"] == desk.alone(last)


def test_who_was_preempted_comes_back_before_prompts_that_came_later() -> None:
    desk = desk_of("fcfs", budget=4, slots=3)
    first, later = make_request("first", SHORT), make_request("later", LONG)
    desk.add(first, later)
    desk.submit(), desk.deliver()
    desk.scheduler._preempt(desk.scheduler._by_id["first"], Preemption.BLOCKS)
    plan = desk.submit()
    assert plan is not None
    running = [seq.id for seq in desk.scheduler.in_flight[-1].seqs]
    assert running[0] == "first"
    desk.finish()
    assert desk.got == {"first": desk.alone(first), "later": desk.alone(later)}


def test_a_step_that_failed_is_told_as_a_recovery() -> None:
    desk = desk_of("fcfs")
    desk.add(request := make_request("a", LONG))
    desk.submit(), desk.deliver()
    desk.worker.fail_next = "late"
    desk.submit(), desk.deliver()
    desk.finish()
    assert desk.scheduler.preemptions == {Preemption.RECOVERY: 1}
    assert desk.got["a"] == desk.alone(request)


def test_prompts_under_way_and_waiting_ones_take_turns_by_their_place_alone() -> None:
    """One under way comes before the one that waits, and one after it."""
    desk = desk_of(budget=4)
    requests = [ranked("last", LONG, 5), ranked("first", LONG, 1), ranked("between", LONG, 3)]
    for request in requests:
        desk.add(request)
        desk.submit()
    assert [[seq.id for seq in record.seqs] for record in desk.scheduler.in_flight] == [["last"], ["first"], ["first"]]
    desk.finish()
    assert desk.got == {request.id: desk.alone(request) for request in requests}


def background(name: str, prompt: tuple[int, ...], **params: int) -> Request:
    return ranked(name, prompt, BACKGROUND, **params)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_work_in_the_background_gives_its_slot_to_whoever_comes(policy: str) -> None:
    desk = desk_of(policy, slots=2)
    works = [background(f"work {n}", (*SHORT, n), max_tokens=30) for n in range(4)]
    desk.add(*works)
    desk.submit(), desk.deliver()
    desk.add(asked := ranked("asked", SHORT, 2**31 - 1 if policy == "priority" else 0))
    assert plans_until_token(desk, "asked") == 1
    assert desk.scheduler.preemptions[Preemption.PRIORITY] == 1
    desk.finish()
    assert desk.got == {each.id: desk.alone(each) for each in (*works, asked)}


def test_who_comes_first_is_served_first_within_each_kind() -> None:
    desk = desk_of("fcfs", slots=1)
    desk.add(
        *(background(name, SHORT, max_tokens=2) for name in ("w1", "w2")), ranked("a", SHORT, 0), ranked("b", SHORT, 0)
    )
    ended: list[str] = []
    desk.scheduler.on_finish = lambda request, stats: ended.append(request.id)
    desk.finish()
    assert ended == ["a", "b", "w1", "w2"]


def test_without_work_in_the_background_nobody_is_looked_for_to_give_way() -> None:
    desk = desk_of("fcfs", slots=1)
    desk.add(ranked("a", SHORT, 0), ranked("b", SHORT, -5))
    assert not desk.scheduler._policy.preempts


# ---- owners ---------------------------------------------------------------------------------------------------------


def owned(owner: str, number: int, prompt: tuple[int, ...] = SHORT, **params: int) -> Request:
    """Prompts of different owners and numbers differ from the first token on."""
    name = f"{owner} {number}"
    return replace(make_request(name, prompt, **params), owner=owner, cache_salt=name)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_flood_of_one_owner_delays_no_other_that_waits_for_budget(policy: str) -> None:
    desk = desk_of(policy, slots=8, budget=8, pages=200)
    flood = [owned("a", number, LONG, max_tokens=1) for number in range(12)]
    desk.add(*flood)
    desk.submit(), desk.deliver()
    desk.add(asked := owned("b", 0, max_tokens=3))
    plans = plans_until_token(desk, "b 0")
    assert plans <= 7, "what has begun goes on, and nothing that has not"  # 12 prompts are 60 plans
    assert not desk.scheduler.preemptions
    desk.finish()
    assert desk.got == {each.id: desk.alone(each) for each in (*flood, asked)}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_an_owner_below_its_share_takes_slots_of_one_beyond_it(policy: str) -> None:
    desk = desk_of(policy, slots=4, budget=64, pages=200)
    flood = [owned("a", number, max_tokens=60) for number in range(20)]
    desk.add(*flood)
    desk.submit(), desk.deliver()
    asked = [owned("b", number, max_tokens=60) for number in range(4)]
    desk.add(*asked)
    for number in range(2):
        assert plans_until_token(desk, f"b {number}") <= 20
    running = {seq.id for seq in desk.scheduler.running.leaders()}
    assert sorted(name[0] for name in running) == ["a", "a", "b", "b"], "half of four places"
    for _ in range(10):
        desk.submit(), desk.deliver()
    assert {seq.id for seq in desk.scheduler.running.leaders()} == running, "and no more"
    assert desk.scheduler.preemptions == {Preemption.PRIORITY: 2}
    desk.finish()
    assert desk.got == {each.id: desk.alone(each) for each in (*flood, *asked)}


def test_owners_take_turns_and_each_ones_requests_start_as_they_came() -> None:
    desk = desk_of("fcfs", slots=1)
    began: list[str] = []
    desk.scheduler.on_begin = lambda requests: began.extend(request.id for request in requests)
    desk.add(*(owned("a", number, max_tokens=2) for number in range(4)))
    desk.add(*(owned("b", number, max_tokens=2) for number in range(2)))
    desk.finish()
    assert began == ["a 0", "b 0", "a 1", "b 1", "a 2", "a 3"]


def test_blocks_are_taken_from_the_owner_that_has_most() -> None:
    policy, running = FCFS(), list[Sequence]()
    for number, owner in enumerate(["a", "a", "b", "a", "c"]):
        running.append(Sequence(owned(owner, number), 1))
        running[-1].order = policy.order(running[-1].request, number)
    assert policy.keeping(running)[-1].id == "a 3"
    assert policy.keeping(running[1:3])[-1].id == "a 1", "where all have equally much, the last in order"
    running.append(Sequence(background("w", SHORT), 1))
    running[-1].order = policy.order(running[-1].request, 5)
    assert policy.keeping(running)[-1].id == "w"
    assert policy.keeping(running)[0].id == "a 0"


def test_owners_that_have_nothing_ahead_are_forgotten() -> None:
    policy = FCFS()
    for number in range(5000):
        order = policy.order(owned(f"owner {number}", 0), number)
        place = (*order[:2], 1000 * number, number)
        policy.begin(SimpleNamespace(order=place, request=SimpleNamespace(owner="")))  # type: ignore[arg-type]
    assert len(policy._next) <= MOST_OWNERS
