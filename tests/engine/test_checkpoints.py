"""Which states are kept, at which boundaries, for how long, and what comes of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ridgeline.core.plan.request import Preemption, Request
from ridgeline.core.plan.step import RowKind, StepPlan
from ridgeline.core.specs.cache_layout import CacheGroup, CacheLayout
from ridgeline.core.specs.state import KVSpec, RecurrentSpec, StatePart
from ridgeline.engine.cache.checkpoints import Checkpoint, Checkpoints
from ridgeline.engine.cache.idle import SLACK, Idle, IdlePages
from ridgeline.engine.cache.manager import CacheManager
from ridgeline.engine.sequence import Sequence
from tests.engine.desk import Desk, make_request
from tests.engine.layouts import Groups, layout_of

HYBRID: Groups = ((None, 1), ("state", 2))
LONE: Groups = (("state", 2),)
BOTH = pytest.mark.parametrize("groups", [HYBRID, LONE], ids=["hybrid", "states alone"])


def words(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1, 10_000) for _ in range(count)]


def run(desk: Desk, *requests: Request) -> list[StepPlan]:
    """All plans until nothing is left, and the tokens are those of the requests alone."""
    desk.add(*requests)
    plans: list[StepPlan] = []
    while desk.scheduler.has_work:
        plan = desk.submit() if len(desk.scheduler.in_flight) < 2 else None
        if plan is not None:
            plans.append(plan)
        else:
            desk.deliver()
    for request in requests:
        assert desk.got[request.id] == desk.alone(request)
    return plans


def hit_of(desk: Desk, *requests: Request) -> list[int]:
    """The cached tokens with which requests start that come after each other."""
    hits: list[int] = []
    for request in requests:
        before = desk.scheduler.cache.hit_tokens
        run(desk, request)
        hits.append(desk.scheduler.cache.hit_tokens - before)
    return hits


def states(desk: Desk) -> int:
    """How many states the cache keeps."""
    exact = desk.scheduler.cache.checkpoints.groups
    return sum(g in exact for g, _, _ in desk.scheduler.cache.index.published()) // len(exact)


@BOTH
@pytest.mark.parametrize("length", [1, 4, 15, 16, 17, 32, 47, 50])
def test_a_prompt_takes_as_many_steps_as_its_tokens_need(groups: Groups, length: int) -> None:
    desk = Desk(groups=groups, budget=16, pages=60)
    plans = run(desk, make_request("a", words(1, length), max_tokens=2))
    assert sum(RowKind.CHUNK in plan.rows.kinds_R for plan in plans) == -(-length // 16)
    assert hit_of(desk, make_request("b", words(1, length), max_tokens=2)) == [(length - 1) // 4 * 4]


@BOTH
def test_decoding_leaves_only_its_end_behind(groups: Groups) -> None:
    desk = Desk(groups=groups, pages=60)
    run(desk, make_request("a", words(2, 10), max_tokens=50))
    assert states(desk) == 2  # the prompt's last boundary, and the end
    assert desk.scheduler.cache.checkpoints.counts.made == 2


@BOTH
def test_decoding_leaves_a_state_where_the_interval_says(groups: Groups) -> None:
    desk = Desk(groups=groups, pages=60, state_checkpoint_interval=12)
    run(desk, make_request("a", words(2, 10), max_tokens=50))
    lengths = {node.length for kept in desk.scheduler.cache.checkpoints._kept for node in kept.values()}
    assert lengths == {8, 20, 32, 44, 56, 59}


@BOTH
def test_a_long_prompt_leaves_a_state_where_the_interval_says(groups: Groups) -> None:
    desk = Desk(groups=groups, pages=60, budget=14, state_checkpoint_interval=12)
    run(desk, make_request("a", words(2, 50), max_tokens=1))
    lengths = {node.length for kept in desk.scheduler.cache.checkpoints._kept for node in kept.values()}
    assert lengths == {12, 28, 40, 48, 50}


@BOTH
def test_a_request_holds_one_state_however_long_it_runs(groups: Groups) -> None:
    desk = Desk(groups=groups, pages=60)
    desk.add(make_request("a", words(3, 10), max_tokens=50))
    exact = desk.scheduler.cache.checkpoints.groups[0]
    seen = set()
    while desk.scheduler.has_work:
        while len(desk.scheduler.in_flight) < 2 and desk.submit():
            pass
        for seq in desk.scheduler.running.leaders():
            if len(seq.tokens) > 16:  # it has let go of its mark
                seen |= {block for block in seq.blocks[exact] if block}
        desk.deliver()
    assert len(seen) == 1


@BOTH
def test_the_third_request_with_a_beginning_finds_it(groups: Groups) -> None:
    """The first cannot know of it, and the second leaves the state."""
    desk = Desk(groups=groups, pages=90)
    requests = [make_request(f"r{n}", words(4, 22) + words(5 + n, 9), max_tokens=3) for n in range(5)]
    assert hit_of(desk, *requests) == [0, 0, 20, 20, 20]


@BOTH
def test_of_many_that_come_together_one_computes_their_beginning(groups: Groups) -> None:
    desk = Desk(groups=groups, pages=150, budget=64, slots=6)
    requests = [make_request(f"r{n}", words(4, 22) + words(5 + n, 9), max_tokens=3) for n in range(6)]
    plans = run(desk, *requests)
    assert desk.scheduler.cache.hit_tokens == 5 * 20
    ran = sum(int(plan.rows.num_tokens_R[plan.rows.kinds_R == RowKind.CHUNK].sum()) for plan in plans)
    assert ran == 6 * 31 - 5 * 20
    assert [len(plan.rows) for plan in plans[:2]] == [1, 6]


@BOTH
def test_samples_of_one_prompt_wait_for_its_first(groups: Groups) -> None:
    desk = Desk(groups=groups, pages=150, slots=4)
    requests = [make_request(f"r{n}", words(4, 30), max_tokens=4) for n in range(4)]
    run(desk, *requests)
    assert desk.scheduler.cache.hit_tokens == 3 * 28


@BOTH
def test_every_turn_of_a_chat_finds_all_but_its_new_tokens(groups: Groups) -> None:
    desk = Desk(groups=groups, pages=150, budget=16)
    known, written, cache = words(7, 9), 0, desk.scheduler.cache
    for turn in range(10):
        request, before = make_request(f"turn {turn}", known, max_tokens=3), cache.hit_tokens
        run(desk, request)
        assert cache.hit_tokens - before == written
        known = [*known, *desk.got[request.id]]
        written = len(known) - 1  # the last token was drawn, and not run
        known += words(20 + turn, 2)


def test_whoever_gives_way_goes_on_from_its_state() -> None:
    """Its last tokens are still on their way when it leaves."""
    for groups in (HYBRID, LONE):
        for steps in range(1, 8):
            desk = Desk(groups=groups, pages=60, budget=16)
            request = make_request("a", words(8, 21), max_tokens=20)
            desk.add(request)
            for _ in range(steps):
                desk.submit()
                if len(desk.scheduler.in_flight) > 1:
                    desk.deliver()
            [seq] = desk.scheduler.running.leaders()
            reached = int(desk.scheduler.slots.kv_len[seq.slot])
            assert desk.scheduler.in_flight
            desk.scheduler._preempt(seq, Preemption.BLOCKS)
            while desk.scheduler.in_flight:
                desk.deliver()
            desk.submit()
            assert seq.cached_tokens == (reached if reached >= 20 + 4 else 20 if reached >= 20 else 16)
            desk.finish()
            assert desk.got["a"] == desk.alone(request)


def test_a_short_way_is_run_again() -> None:
    desk = Desk(groups=HYBRID, pages=60)
    desk.scheduler.cache.checkpoints.least = 16
    desk.add(make_request("a", words(8, 9), max_tokens=20))
    for _ in range(3):
        desk.submit()
    [seq] = desk.scheduler.running.leaders()
    desk.scheduler._preempt(seq, Preemption.BLOCKS)
    assert desk.scheduler.cache.checkpoints.counts.made == 0
    desk.finish()


def test_one_long_conversation_does_not_drive_out_what_all_others_begin_with() -> None:
    desk = Desk(groups=HYBRID, pages=40, budget=64)
    everybody = words(9, 20)
    for n in range(8):
        run(desk, make_request(f"user {n}", everybody + words(30 + n, 5), max_tokens=1))
    known = words(10, 4)
    for turn in range(14):
        request = make_request(f"turn {turn}", known, max_tokens=2)
        run(desk, request)
        known = [*known, *desk.got[request.id], *words(50 + turn, 1)]
    assert desk.scheduler.cache.checkpoints.counts.evicted > 3
    assert hit_of(desk, make_request("user", everybody + words(99, 5), max_tokens=1)) == [20]


def test_states_nobody_uses_have_a_share_of_the_pages() -> None:
    desk = Desk(groups=HYBRID, pages=101, state_cache_share=0.2)
    for n in range(40):
        run(desk, make_request(f"r{n}", words(100 + n, 12), max_tokens=3))
    pool, cache = desk.scheduler.cache.pool, desk.scheduler.cache
    assert pool.idle_states == 20
    assert cache.checkpoints.counts.made == 80
    assert states(desk) == 80 - cache.checkpoints.counts.evicted


def test_a_state_goes_with_the_keys_before_it() -> None:
    desk = Desk(groups=HYBRID, pages=40)
    run(desk, make_request("a", words(11, 20), max_tokens=1))
    cache = desk.scheduler.cache
    assert states(desk) == 2
    index = cache.index
    for g, state, node_hash in [each for each in index.published() if each[0] == 1]:
        keys = index.get(node_hash).blocks[0]
        cache.published.on_evict(0, [keys])
        cache.pool.forget(0, keys)
        assert index.get(node_hash) is None
        assert not cache.pool.is_cached(g, state)
    assert states(desk) == 0
    assert cache.checkpoints.counts.evicted == 2


def test_a_checkpoint_is_worth_the_tokens_since_the_one_before() -> None:
    first = Checkpoint(100, None)
    second = Checkpoint(130, first)
    third = Checkpoint(150, second)
    assert (first.worth, second.worth, third.worth) == (100, 30, 20)
    second.kept = False
    assert third.worth == 50
    third.uses = 4
    assert third.worth == 200


def test_intervals_follow_from_bytes() -> None:
    layout = layout_of(HYBRID, 16, 10)
    own = Checkpoints(layout, share=0.5, interval=None)
    assert (own.least, own.interval) == (16, 1024)
    lone = Checkpoints(layout_of(LONE, 16, 10), share=0.5, interval=None)
    assert (lone.least, lone.interval, lone.most_pages) == (16, 2048, 10)


def test_idle_pages_leave_by_rank_and_then_by_age() -> None:
    draw, pages, known = random.Random(1), IdlePages(), {}
    for order in range(4 * SLACK):
        if known and draw.random() < 0.4:
            least = pages.least()
            assert least == min(known.values())
            page = least.page if draw.random() < 0.5 else draw.choice(list(known))
            pages.discard(page)
            del known[page]
        else:
            known[order] = Idle(draw.choice((1.0, 2.0, 3.5)), order, order)
            pages.add(known[order])
        assert len(pages) == len(known)
    assert len(pages._heap) <= 2 * len(known) + 2 * SLACK


def test_hits_are_counted_for_each_group_as_if_it_were_alone() -> None:
    """The second request finds keys and no state behind them, the third one both."""
    desk = Desk(groups=HYBRID, pages=90)
    cache = desk.scheduler.cache
    requests = [make_request(f"r{n}", words(4, 22) + words(5 + n, 9), max_tokens=3) for n in range(3)]
    found = [(hit_of(desk, request), list(cache.group_hits)) for request in requests]
    assert found == [([0], [0, 0]), ([0], [20, 0]), ([20], [40, 20])]
    assert (cache.queried_tokens, cache.hit_tokens) == (3 * 31, 20)


def test_what_was_given_up_of_who_gave_way_is_not_taken_from_its_new_owner() -> None:
    """The memory that a request leaves goes to another one before its last tokens are known."""
    desk = Desk(groups=HYBRID, pages=9, slots=2, scheduling_policy="priority")
    first, second = make_request("a", words(8, 21), max_tokens=12), make_request("b", words(9, 41), max_tokens=1)
    desk.add(first)
    for _ in range(4):
        desk.submit()
        if len(desk.scheduler.in_flight) > 1:
            desk.deliver()
    [seq] = desk.scheduler.running.leaders()
    desk.scheduler._preempt(seq, Preemption.BLOCKS)
    index = desk.scheduler.cache.index
    left = {(g, block) for g, block, name in index.published() if name.startswith(b"parted")}
    assert {g for g, _ in left} == {0, 1}
    desk.add(replace(second, priority=-1))
    desk.submit()
    taken = {(g, block): name for g, block, name in index.published() if (g, block) in left}
    assert not any(name.startswith(b"parted") for name in taken.values())
    assert taken
    desk.deliver()  # the last plan that the first one was in
    assert {(g, block): index.hash_of(g, block) for g, block in taken} == taken
    desk.finish()
    assert desk.got == {request.id: desk.alone(request) for request in (first, second)}


@BOTH
def test_states_and_forks_are_those_of_one_tenant(groups: Groups) -> None:
    desk = Desk(groups=groups, pages=150)
    alike = [make_request(f"{n}", words(4, 22), max_tokens=3, salt=salt) for n, salt in enumerate(("", "a", "b", ""))]
    assert hit_of(desk, *alike) == [0, 0, 0, 20]
    begin = [make_request(f"r{n}", words(7, 22) + words(8 + n, 9), max_tokens=3, salt=f"{n % 3}") for n in range(9)]
    assert hit_of(desk, *begin) == [0, 0, 0, 0, 0, 0, 20, 20, 20]  # each tenant's third request finds its own


def test_short_conversations_keep_their_states_as_long_as_their_keys() -> None:
    """A page could hold the keys and values of 256 tokens, or one state; each conversation has 40 tokens."""
    keys, state = KVSpec(num_kv_heads=1, head_dim=8), RecurrentSpec(parts=(StatePart((64, 64)),))
    groups = CacheGroup(spec=keys, layers=(0,)), CacheGroup(spec=state, layers=(1,))
    layout = CacheLayout(groups=groups, block_size=4, dtype="float32", num_pages=31)
    assert [layout.blocks_per_page(g) for g in (0, 1)] == [64, 1]
    manager = CacheManager(layout, prefix_caching=True, max_chunk=64)

    def begun(seed: int) -> Sequence:
        seq = Sequence(make_request(f"{seed}", words(seed, 40), max_tokens=1), 2)
        seq.slot = 0
        assert manager.admit(seq, reserve_blocks=0)
        return seq

    for n in range(60):
        seq = begun(n)
        assert manager.tables.extend(seq, 39, 40) is not None
        manager.publish_chunk(seq, 0, 40)
        manager.keep_state(seq, 0, 40, reserve=0)
        manager.release(seq, n + 1, 40)
    hits = [begun(n).cached_tokens for n in reversed(range(50, 60))]
    assert hits[:7] == [36] * 7
