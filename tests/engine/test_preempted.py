"""Which requests are preempted, and what becomes of their blocks that the device gives up (`--preemption-mode`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.request import Preemption, Request, SamplingParams
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.host_tier import HostTierSettings, Preempted
from ridgeline.core.settings.policies import PolicySettings
from ridgeline.engine.cache.manager import CacheManager
from ridgeline.engine.forecast import Forecast
from ridgeline.engine.policy import POLICIES
from ridgeline.engine.pressure import Pressure
from ridgeline.engine.price import Price
from ridgeline.engine.sequence import Sequence
from ridgeline.engine.slots import SlotTable
from tests.engine.desk import Desk, make_request
from tests.engine.layouts import GROUPS, Groups, layout_of
from tests.engine.profiles import quick_settings

PROMPT, SLOW, FAST = 16, 1.0, 1e12  # tokens, and bytes a second: a token runs in a millisecond


def waiting(number: int) -> Sequence:
    return Sequence(
        Request(
            id=str(number),
            prompt_token_ids=tuple(range(100 * number, 100 * number + PROMPT)),
            params=SamplingParams(max_tokens=4),
            seed=0,
            max_total_tokens=PROMPT + 4,
        ),
        num_groups=1,
    )


def run(manager: CacheManager, seq: Sequence) -> None:
    assert manager.admit(seq, reserve_blocks=0)
    assert manager.tables.extend(seq, PROMPT - 1, PROMPT) is not None
    manager.publish_chunk(seq, seq.cached_tokens, PROMPT)
    seq.has_emitted = True
    seq.tokens.append(7)


def resumed(preempted: Preempted, rate: float) -> tuple[int, int]:
    """Return how many blocks were saved while another request ran in the place of a preempted one, and how many of its
    tokens it finds when it starts again."""
    tier = HostTierSettings(pages=40, bytes_per_second=rate, staging_bytes=1 << 30, preempted=preempted)
    manager = CacheManager(layout_of(((None, 1),), 4, 7), prefix_caching=True, max_chunk=64, host_tier=tier)
    assert manager.tier is not None
    first, second = (waiting(number) for number in (1, 2))
    run(manager, first)
    first.preemptions[Preemption.BLOCKS] += 1
    manager.release(first, 1, PROMPT, resumes=True)
    run(manager, second)
    saved = manager.tier.counts.saved_blocks
    manager.release(second, 2, PROMPT, ended=True)
    assert manager.admit(first, reserve_blocks=0)
    return saved, first.cached_tokens


@pytest.mark.parametrize(
    ("preempted", "rate", "saves", "found"),
    [("auto", FAST, True, 16), ("auto", SLOW, True, 8), ("swap", SLOW, True, 16), ("recompute", FAST, False, 8)],
)
def test_blocks_of_a_preempted_request_move_as_it_was_asked_for(
    preempted: Preempted, rate: float, saves: bool, found: int
) -> None:
    """Six pages: the second request needs two more than are free, and the first one's tail goes."""
    assert resumed(preempted, rate) == (2 if saves else 0, found)


def test_swapping_needs_memory_to_swap_to() -> None:
    with pytest.raises(InvalidConfig, match="set kv_offloading_size, in GiB"):
        LLMConfig(model="x", preemption_mode="swap")
    assert LLMConfig(model="x", preemption_mode="swap", kv_offloading_size=1.0).preemption_mode == "swap"
    with pytest.raises(InvalidConfig, match="unknown preemption_mode 'later'; use auto, recompute or swap"):
        LLMConfig(model="x", preemption_mode="later")  # type: ignore[arg-type]


# ---- the way back, and who is preempted -----------------------------------------------------------------------------

PRICE = Price(row=1.0, cached=0.0, token=1.0, pair=0.5)


def crowded(**settings: Any) -> tuple[Desk, list[tuple[str, Preemption]]]:
    """A desk that starts requests whatever they will need, and the list of those that it preempts."""
    desk, preempted = Desk(**settings), list[tuple[str, Preemption]]()
    scheduler = desk.scheduler
    scheduler.running.pressure = Pressure(scheduler.cache, scheduler.running.forecast, PRICE)
    scheduler.running.pressure.admits = lambda seqs, num_running, outranked: True  # type: ignore[method-assign]
    preempt = scheduler._preempt

    def noted(seq: Sequence, reason: Preemption) -> None:
        preempted.append((seq.id, reason))
        leaders = scheduler.running.leaders()
        if reason is Preemption.BLOCKS and len(leaders) > 1:
            assert seq is not min(leaders, key=scheduler._policy.place), "the first one always goes on"
        preempt(seq, reason)

    scheduler._preempt = scheduler._results._preempt = noted  # type: ignore[method-assign]
    return desk, preempted


@pytest.mark.parametrize("policy", ["fcfs", "priority", "vtc"])
def test_of_equally_entitled_requests_that_one_goes_which_is_cheapest_to_have_again(policy: str) -> None:
    """Tokens behind others cost more, so each block of a long request does. It is the last one in order."""
    desk, preempted = crowded(pages=13, scheduling_policy=policy)
    long = make_request("long", tuple(range(20)), max_tokens=12)
    requests = [*(make_request(name, (1, 2, 3, n), max_tokens=12) for n, name in enumerate("ab")), long]
    desk.add(*requests)
    desk.finish()
    assert preempted[0] == ("b", Preemption.BLOCKS)
    assert desk.got == {request.id: desk.alone(request) for request in requests}


def test_what_differs_by_less_than_predictions_err_leaves_the_order_as_it_is() -> None:
    desk, preempted = crowded(pages=10)
    desk.scheduler.running.pressure = pressure = Pressure(desk.scheduler.cache, desk.scheduler.running.forecast)
    pressure.admits = lambda seqs, num_running, outranked: True  # type: ignore[method-assign]
    desk.add(*(make_request(name, (1, 2, 3, n), max_tokens=12) for n, name in enumerate("abc")))
    desk.finish()
    assert preempted[0][0] == "c"


@pytest.mark.parametrize(("rate", "below"), [(FAST, True), (SLOW, False)])
def test_the_cheaper_way_back_is_chosen_when_a_request_is_preempted(rate: float, below: bool) -> None:
    """Blocks for which the host's memory is the way are on it at once, while the device still has them."""
    tier = HostTierSettings(pages=40, bytes_per_second=rate, staging_bytes=1 << 30)
    manager = CacheManager(layout_of(((None, 1),), 4, 7), prefix_caching=True, max_chunk=64, host_tier=tier)
    assert manager.tier is not None
    first, second = (waiting(number) for number in (1, 2))
    run(manager, first)
    way = Pressure(manager, Forecast(manager.layout, SlotTable(1), 0)).way_back(first)
    assert way.below is below
    assert way.cost == pytest.approx(4.0, abs=0.3) if not below else way.cost < 1e-3
    first.preemptions[Preemption.BLOCKS] += 1
    manager.keep_below(first, below=way.below)
    assert manager.tier.counts.saved_blocks == (4 if below else 0)
    manager.release(first, 1, PROMPT, resumes=True)
    run(manager, second)
    assert manager.tier.counts.saved_blocks == (4 if below else 0), "what runs again is not saved when it is evicted"
    manager.release(second, 2, PROMPT, ended=True)
    assert manager.admit(first, reserve_blocks=0)
    assert first.cached_tokens == (16 if below else 8)


def test_windows_give_up_what_no_token_needs_before_a_request_is_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts of 22 tokens hold six blocks each when the first one needs another. Two of them are in the window."""
    found = []
    for shrinks in (True, False):
        desk, preempted = crowded(groups=((4, 1),), pages=33)
        pool, running = desk.scheduler.cache.pool, desk.scheduler.running
        monkeypatch.setattr(running.pressure, "is_high", lambda num_running, pool=pool: pool.free_pages < 26)
        if not shrinks:
            monkeypatch.setattr(running, "shrink_windows", lambda plans, plan_id: False)
        prompts = [tuple(range(100 * n, 100 * n + 22)) for n in (1, 2)]
        requests = [make_request(str(n), prompt, max_tokens=20) for n, prompt in enumerate(prompts)]
        desk.add(*requests)
        desk.finish()
        assert desk.got == {request.id: desk.alone(request) for request in requests}
        found.append(len(preempted))
    assert found[0] == 0 < found[1]


@quick_settings(60)
@given(
    drawn=st.lists(
        st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=12), st.integers(1, 20), st.integers(0, 2)),
        min_size=2,
        max_size=8,
    ),
    groups=st.sampled_from(GROUPS),
    policy=st.sampled_from([*POLICIES]),
    rate=st.sampled_from([SLOW, 1e6, FAST]),
    mode=st.sampled_from(["auto", "recompute", "swap"]),
    extra=st.integers(0, 8),
    staging=st.sampled_from([1, 1 << 14, 1 << 30]),
)
def test_no_choice_of_victims_and_ways_keeps_requests_from_ending(
    drawn: list[tuple[list[int], int, int]],
    groups: Groups,
    policy: str,
    rate: float,
    mode: Preempted,
    extra: int,
    staging: int,
) -> None:
    """A cache that holds little more than the longest request. All end within a bounded number of plans, the first in
    order is never preempted for want of blocks, and tokens are those of each request alone."""
    tier = HostTierSettings(pages=60, bytes_per_second=rate, staging_bytes=staging, preempted=mode)
    pages = 1 + layout_of(groups, 2, 2).pages_needed(36, 16) + extra
    settings = {"scheduling_policy": policy, "host_tier": tier, "policy": PolicySettings(slo_ttft=3600)}
    desk, _ = crowded(groups=groups, block_size=2, pages=pages, budget=16, **settings)
    requests = [
        replace(make_request(f"r{n}", tuple(prompt), max_tokens=count), priority=priority, owner="ab"[n % 2])
        for n, (prompt, count, priority) in enumerate(drawn)
    ]
    desk.add(*requests)
    desk.finish()
    assert desk.got == {request.id: desk.alone(request) for request in requests}
