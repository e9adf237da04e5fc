"""Requests that need more of the cache than there is: which start, which are preempted, and what is kept of them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.plan.request import Preemption
from ridgeline.engine.cache.plain_pool import pool_of
from ridgeline.engine.cache.pool import BlockPool
from ridgeline.engine.forecast import EDGES, Forecast, Outputs
from ridgeline.engine.policy import POLICIES
from ridgeline.engine.slots import SlotTable
from ridgeline_bench.scripts.preemption import WORKLOADS, Run
from tests.engine.desk import Desk, make_request
from tests.engine.layouts import GROUPS, layout_of
from tests.engine.profiles import quick_settings

KINDS = {workload.name: workload for workload in WORKLOADS}


# ---- what the cache keeps ---------------------------------------------------------------------------------------


def used_pool(pages: int, evicted: list[int]) -> tuple[BlockPool, list[int]]:
    pool = pool_of(layout_of(((None, 1),), 4, pages + 1), on_evict=lambda group, blocks: evicted.extend(blocks))
    (blocks,) = pool.take([pages]) or [[]]
    for block in blocks:
        pool.mark_cached(0, block)
    return pool, blocks


def test_blocks_that_somebody_comes_back_for_outlive_those_of_unknown_future() -> None:
    evicted: list[int] = []
    pool, blocks = used_pool(6, evicted)
    awaited, others = blocks[:3], blocks[3:]
    pool.await_return("preempted", [(0, block) for block in awaited])
    for block in [*reversed(awaited), *others]:  # the awaited ones are freed first
        pool.release(0, block, 0)
    assert pool.awaited_pages == 3
    pool.take([5])
    assert evicted == [*others, *awaited[:0:-1]], "the tail goes before the head"
    assert pool.awaited_pages == 1


def test_what_a_request_that_came_back_did_not_take_is_given_up_like_any_other() -> None:
    evicted: list[int] = []
    pool, blocks = used_pool(4, evicted)
    pool.await_return("preempted", [(0, block) for block in blocks[:2]])
    for block in blocks:
        pool.release(0, block, 0)
    pool.share(0, blocks[0])
    pool.returned("preempted")
    assert pool.awaited_pages == 0
    pool.take([3])
    assert evicted == [blocks[2], blocks[3], blocks[1]]


def test_a_block_that_two_come_back_for_is_kept_for_the_second() -> None:
    evicted: list[int] = []
    pool, blocks = used_pool(3, evicted)
    for owner in ("first", "second"):
        pool.await_return(owner, [(0, blocks[0])])
    for block in blocks:
        pool.release(0, block, 0)
    pool.returned("first")
    pool.take([2])
    assert evicted == blocks[1:]


# ---- forecasts --------------------------------------------------------------------------------------------------


@quick_settings(100)
@given(outputs=st.lists(st.tuples(st.integers(1, 3000), st.booleans()), max_size=40))
def test_the_share_of_longer_outputs_is_the_product_limit(outputs: list[tuple[int, bool]]) -> None:
    """Compared with fractions, bucket by bucket. Every output that ends makes those before it count a little less."""
    known = Outputs()
    for length, cut in outputs:
        known.note(length, cut=cut)
    share = known.longer(np.array([], np.int32))
    weighted = [(Fraction(255, 256) ** age, output) for age, output in enumerate(reversed(outputs))]
    expected = Fraction(1)
    for start, end, found in zip(EDGES, EDGES[1:], share[1:], strict=False):
        ended = sum(w for w, (length, cut) in weighted if start <= length < end and not cut)
        reached = sum(w for w, (length, _) in weighted if length >= end) + ended
        assumed = Fraction(1 - np.exp(-(max(end, 256) - max(start, 256)) / 512))
        expected *= 1 - (ended + assumed) / (reached + 1)
        assert found == pytest.approx(float(expected), rel=1e-9)


@quick_settings(100)
@given(requests=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=6))
def test_where_all_outputs_reach_their_limits_the_growth_is_that_of_a_simulation(
    requests: list[tuple[int, int]],
) -> None:
    layout = layout_of(((None, 1),), 4, 1000)
    slots = SlotTable(len(requests))
    forecast = Forecast(layout, slots, 0)
    for _ in range(2000):
        forecast.outputs.note(200, cut=True)
    for slot, (written, left) in enumerate(requests):
        slots.used[slot] = True
        slots.kv_len[slot], slots.last_kv_len[slot] = written, written + left
    blocks = [
        sum(-(-(written + min(step, left)) // 4) for written, left in requests if step <= left + 2)
        for step in range(1, 100)
    ]
    now = sum(-(-written // 4) for written, _ in requests)
    assert forecast.growth() == pytest.approx(max(blocks) - now, abs=1)


@quick_settings(60)
@given(
    cohorts=st.lists(st.tuples(st.integers(1, 240), st.integers(1, 30)), min_size=1, max_size=4),
    slower=st.integers(1, 4),
)
def test_the_highest_of_many_moments_is_found(cohorts: list[tuple[int, int]], slower: int) -> None:
    """Requests of one limit that started one after the other, in several cohorts: they end one by one."""
    layout = layout_of(((None, 1),), 4, 9000)
    requests = [(max(1, begun - n // slower), 256) for begun, count in cohorts for n in range(count)]
    slots = SlotTable(len(requests))
    forecast = Forecast(layout, slots, 0)
    for _ in range(2000):
        forecast.outputs.note(256, cut=True)
    for slot, (written, last) in enumerate(requests):
        slots.used[slot] = True
        slots.kv_len[slot], slots.last_kv_len[slot] = written, last
    blocks = [
        sum(-(-min(written + step, last) // 4) for written, last in requests if step <= last - written + 2)
        for step in range(1, 260)
    ]
    most = max(blocks)
    assert most * 0.99 - 1 <= forecast.growth() + sum(-(-written // 4) for written, _ in requests) <= most


# ---- the scheduler ----------------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "factor", "steady"),
    [("equal", 1.2, False), ("equal", 1.2, True), ("equal", 2.0, False), ("priorities", 1.2, True)],
)
def test_preempted_requests_find_four_fifths_of_their_tokens_again(name: str, factor: float, steady: bool) -> None:
    record = Run(KINDS[name], factor, steady).run().record()
    assert record["preemptions"] > 0
    assert record["found"] >= 0.8
    assert record["run_again"] <= 0.05


def test_a_request_waits_where_those_that_run_will_need_its_blocks() -> None:
    """Eighteen blocks: each needs nine in the end. A third one would fit at first."""
    desk = Desk(pages=19, slots=4)
    requests = [make_request(name, (1, 2, n), max_tokens=33) for n, name in enumerate("abc")]
    desk.add(*requests)
    desk.submit(), desk.deliver()
    assert desk.scheduler.num_running == 2
    desk.finish()
    assert desk.scheduler.preemptions.total() == 0
    assert desk.got == {request.id: desk.alone(request) for request in requests}


PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=12).map(tuple)


@quick_settings(60)
@given(
    drawn=st.lists(
        st.tuples(PROMPTS, st.integers(1, 24), st.integers(0, 2), st.integers(0, 9)), min_size=2, max_size=9
    ),
    groups=st.sampled_from(GROUPS),
    policy=st.sampled_from([*POLICIES]),
    caching=st.booleans(),
    extra=st.integers(0, 12),
    short=st.booleans(),
)
def test_every_request_ends_and_gives_back_what_it_had(drawn, groups, policy, caching, extra, short) -> None:
    """Whatever was expected of their lengths, and however little room there is."""
    needed = layout_of(groups, 2, 2).pages_needed(36, 16)
    settings = {"scheduling_policy": policy, "enable_prefix_caching": caching}
    desk = Desk(groups=groups, block_size=2, pages=1 + needed + extra, budget=16, **settings)
    for _ in range(99 * short):
        desk.scheduler.running.forecast.outputs.note(1, cut=False)
    requests = [
        replace(make_request(f"r{n}", prompt, max_tokens=count), priority=priority)
        for n, (prompt, count, priority, _) in enumerate(drawn)
    ]
    for request, (*_, pause) in zip(requests, drawn, strict=True):
        desk.add(request)
        for _ in range(pause):
            if desk.submit():
                desk.deliver()
    desk.finish()
    assert desk.got == {request.id: desk.alone(request) for request in requests}
    assert (
        desk.scheduler.preemptions.total()
        == desk.scheduler.preemptions[Preemption.BLOCKS] + (desk.scheduler.preemptions[Preemption.PRIORITY])
    )
    assert desk.scheduler.cache.pool.awaited_pages == 0
