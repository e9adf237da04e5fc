"""Requests that cannot start for a reason of their own let others pass, a bounded number of them; and vLLM's bounds on
prompts of which a step runs a part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.step import StepResult
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.policies import PolicySettings
from ridgeline.core.specs import state
from ridgeline.defaults import choose_limits
from ridgeline.engine import scheduler, waiting
from ridgeline.engine.policy import POLICIES
from ridgeline.engine.sequence import Sequence, Status
from tests.engine.desk import Desk, make_request
from tests.engine.layouts import REVOCABLE, Groups
from tests.engine.profiles import quick_settings


def ask(name: str, adapter: int = 0, length: int = 6, max_tokens: int = 4, owner: str = "") -> Any:
    prompt = [(7 * sum(name.encode()) + n) % 90 for n in range(length)]
    request = make_request(name, prompt, max_tokens=max_tokens)
    return replace(request, adapter=adapter, prefix_keys=(f"{adapter}",), owner=owner)


def seqs(desk: Desk) -> dict[str, Sequence]:
    return dict(desk.scheduler._by_id)


def running(desk: Desk) -> list[str]:
    return [name for name, seq in seqs(desk).items() if seq.status is Status.RUNNING]


def test_a_request_whose_adapter_has_no_place_lets_others_pass() -> None:
    desk = Desk(max_loras=1)
    desk.add(ask("first", 1), ask("other adapter", 2), ask("plain"), ask("same adapter", 1))
    desk.submit()
    assert running(desk) == ["first", "plain", "same adapter"]
    desk.finish()
    assert len(desk.got["other adapter"]) == 4


def test_it_starts_before_those_that_came_later_once_enough_have_overtaken_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "OVERTAKES", 3)
    desk = Desk(max_loras=1, slots=8)
    desk.add(ask("first", 1), ask("other", 2), *(ask(f"later {n}", 1, max_tokens=1 + n) for n in range(6)))
    desk.submit()
    assert len(running(desk)) == 4, "the first, and three that overtake"
    assert seqs(desk)["other"].overtaken == 3
    for _ in range(200):
        if "other" in running(desk) or not desk.scheduler.has_work:
            break
        assert len(running(desk)) <= 4
        desk.submit()
        desk.deliver()
    assert "other" in running(desk)
    desk.finish()
    assert all(desk.got.values())


REQUESTS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 14), st.integers(1, 6), st.sampled_from("abc")), max_size=14
)


@settings(max_examples=60)
@given(
    asked=REQUESTS,
    policy=st.sampled_from([*POLICIES]),
    places=st.integers(1, 2),
    most=st.integers(0, 4),
    partial=st.integers(0, 3),
    steps=st.integers(0, 3),
)
def test_nobody_starves_and_no_answer_changes(
    asked: list[tuple[int, int, int, str]], policy: str, places: int, most: int, partial: int, steps: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "OVERTAKES", most)
        desk = Desk(
            max_loras=places, scheduling_policy=policy, budget=10, max_num_partial_prefills=partial, pages=65,
            max_long_partial_prefills=min(1, partial), long_prefill_token_threshold=5,
        )  # fmt: skip
        requests = [ask(f"{n}", *each) for n, each in enumerate(asked)]
        for request in requests:
            desk.add(request)
            for _ in range(steps):
                before = seqs(desk)
                desk.submit()
                check(desk, before, places, most, partial)
                if desk.scheduler.in_flight:
                    desk.deliver()
        for _ in range(600):
            before = seqs(desk)
            if desk.submit() is None and not desk.scheduler.in_flight:
                break
            check(desk, before, places, most, partial)
            if desk.scheduler.in_flight:
                desk.deliver()
        desk.finish()
        assert desk.got == {each.id: desk.alone(each) for each in requests}


def check(desk: Desk, before: dict[str, Sequence], places: int, most: int, partial: int) -> None:
    every = seqs(desk)
    assert all(seq.status in (Status.WAITING, Status.RUNNING) for seq in every.values()), "nothing is left aside"
    adapters = {seq.request.adapter for seq in every.values() if seq.status is Status.RUNNING} - {0}
    assert len(adapters) <= places
    assert all(seq.overtaken <= most for seq in every.values())
    under_way = desk.scheduler.running.prefilling
    assert not partial or len(under_way) <= partial
    assert not partial or sum(len(seq.tokens) > 5 for seq in under_way if not seq.preemptions) <= 1


# ---- vLLM's bounds ---------------------------------------------------------------------------------------------------


def test_several_prompts_share_a_step() -> None:
    """So a short prompt behind a long one needs no step more."""
    for partial, first in ((0, [20]), (1, [20]), (2, [10, 5])):
        desk = Desk(budget=20, max_num_partial_prefills=partial)
        desk.add(make_request("long", range(40), max_tokens=2), make_request("short", range(50, 55), max_tokens=2))
        plan = desk.submit()
        assert plan is not None
        assert plan.rows.num_tokens_R.tolist() == first
        desk.finish()


def test_no_more_prompts_are_under_way_than_may_be() -> None:
    desk = Desk(budget=12, max_num_partial_prefills=2)
    desk.add(*(make_request(f"{n}", range(100 * n, 100 * n + 30), max_tokens=2) for n in range(4)))
    plan = desk.submit()
    assert plan is not None
    assert plan.rows.num_tokens_R.tolist() == [6, 6]
    desk.finish()


@quick_settings(40)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=8),
    groups=st.sampled_from(REVOCABLE),
    policy=st.sampled_from([*POLICIES]),
    pages=st.integers(60, 90),
)
def test_without_parts_each_prompt_runs_in_one_step(
    prompts: list[tuple[int, int]], groups: Groups, policy: str, pages: int
) -> None:
    """Those that do not fit beside rows that decode wait until they do, and all end as they do alone. A promise between
    tokens cuts none."""
    slo = PolicySettings(slo_ttft=3600, slo_itl=10e-3)
    desk = Desk(groups=groups, pages=pages, scheduling_policy=policy, chunked_prefill=False, policy=slo)
    requests = [
        make_request(f"r{n}", range(100 * n, 100 * n + length), max_tokens=count)
        for n, (length, count) in enumerate(prompts)
    ]
    desk.add(*requests)
    started = set[str]()
    while desk.scheduler.has_work:
        while len(desk.scheduler.in_flight) < 2 and (plan := desk.submit()):
            for span in plan.spans:
                seq = desk.scheduler.in_flight[-1].seqs[span.row]
                assert len(span.token_ids) == len(seq.tokens) - seq.cached_tokens
                started.add(seq.id)
        desk.deliver()
    assert started == {request.id for request in requests}
    assert desk.got == {request.id: desk.alone(request) for request in requests}


def test_a_prompt_without_room_for_one_step_runs_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a window a request is sure to find room for some tokens alone, and the device may lack memory for all."""
    monkeypatch.setattr(scheduler, "WINDOW_CHUNK", 16)
    monkeypatch.setattr(state, "WINDOW_CHUNK", 16)
    desk = Desk(groups=((5, 1),), pages=8, chunked_prefill=False)
    long = make_request("long", range(50))
    desk.add(long)
    desk.finish()
    assert desk.got["long"] == desk.alone(long)

    desk = Desk(chunked_prefill=False)
    pair = [make_request(f"r{n}", range(20 * n, 20 * n + 30)) for n in range(2)]
    desk.add(*pair)
    plan = desk.scheduler.schedule()
    assert plan is not None
    assert plan.num_tokens > 32
    desk.scheduler.update(StepResult(plan.id, error="no memory", out_of_memory=True))
    more = make_request("more", range(200, 250))
    desk.add(more)
    desk.finish()
    assert desk.got == {each.id: desk.alone(each) for each in (*pair, more)}


def test_short_prompts_overtake_long_ones_beyond_the_bound() -> None:
    desk = Desk(budget=18, max_num_partial_prefills=3, max_long_partial_prefills=1, long_prefill_token_threshold=8)
    desk.add(
        make_request("long", range(40), max_tokens=2),
        make_request("long too", range(100, 140), max_tokens=2),
        make_request("short", range(50, 55), max_tokens=2),
    )
    desk.submit()
    assert running(desk) == ["long", "short"]
    desk.finish()
    assert len(desk.got["long too"]) == 2


def test_more_long_prompts_than_prompts_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="max_long_partial_prefills is 3, above max_num_partial_prefills 2"):
        LLMConfig(max_num_partial_prefills=2, max_long_partial_prefills=3)


def test_prompts_without_parts_need_a_step_that_has_room_for_the_longest() -> None:
    whole = LLMConfig(enable_chunked_prefill=False, max_num_batched_tokens=600)
    assert choose_limits(whole, torch.device("cpu"), longest=600) == (32, 600)
    with pytest.raises(InvalidConfig, match="is 600, and a prompt of up to 601 tokens runs in one step; raise it"):
        choose_limits(whole, torch.device("cpu"), longest=601)
    assert choose_limits(LLMConfig(enable_chunked_prefill=False), torch.device("cpu"), longest=9000) == (32, 9000)
    for wrong in ({"itl_target": 5.0}, {"max_num_partial_prefills": 2}, {"long_prefill_token_threshold": 64}):
        with pytest.raises(InvalidConfig, match=f"{next(iter(wrong))} divides prompts, which run whole"):
            LLMConfig(enable_chunked_prefill=False, **wrong)
