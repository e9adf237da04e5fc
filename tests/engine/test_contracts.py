"""What engine and worker promise each other, one promise per test (the ideal worker checks every read and write)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ridgeline.core.errors import DeviceLost, InvalidRequest
from ridgeline.core.plan.request import MAX_STOP_IDS, Preemption, Request, TokenEvent
from ridgeline.core.plan.step import Feature
from ridgeline.core.settings.config import EngineConfig
from ridgeline.core.specs.cache_layout import NULL_BLOCK
from ridgeline.engine.engine import Engine
from ridgeline.kernels.base.cost import Headroom
from tests.engine.desk import Desk, make_request
from tests.engine.ideal_worker import VOCAB, IdealWorker, alone
from tests.engine.layouts import Groups, layout_of
from tests.engine.test_scheduler_machine import Alternating

PROMPT = (1, 2, 3, 1, 2, 2, 1, 3, 3, 1)  # two full blocks of four and a rest


# ---- late results ---------------------------------------------------------------------------------------------------


def test_tokens_that_come_after_an_abort_are_dropped() -> None:
    desk, request = Desk(), make_request("a", PROMPT)
    desk.add(request)
    desk.submit(), desk.deliver(), desk.submit(), desk.submit()
    assert desk.rows_of("a") == 2
    assert desk.scheduler.abort("a")
    assert desk.deliver() == []
    assert desk.deliver() == []
    assert desk.got["a"] == desk.alone(request)[:1]
    desk.finish()


def test_a_token_that_comes_after_a_preemption_counts_and_the_request_goes_on_from_it() -> None:
    desk, request = Desk(), make_request("a", PROMPT)
    desk.add(request)
    desk.submit(), desk.submit()
    [seq] = desk.scheduler.in_flight[0].seqs
    desk.scheduler._preempt(seq, Preemption.BLOCKS)
    assert desk.submit() is None, "it was planned again before its late tokens were known"
    desk.deliver()
    assert desk.submit() is None
    desk.deliver()
    assert desk.got["a"] == desk.alone(request)[:2]
    desk.finish()
    assert desk.got["a"] == desk.alone(request)


def test_a_request_may_end_by_a_token_that_comes_after_its_preemption() -> None:
    desk, request = Desk(), make_request("a", PROMPT, max_tokens=1)
    desk.add(request)
    desk.submit()
    desk.scheduler._preempt(desk.scheduler.in_flight[0].seqs[0], Preemption.BLOCKS)
    desk.deliver()
    assert desk.ended == {"a": ("length", None)}
    desk.finish()


def test_a_slot_serves_its_next_request_while_plans_of_the_last_are_in_flight() -> None:
    desk, first, second = Desk(slots=1), make_request("a", PROMPT), make_request("b", PROMPT[::-1])
    desk.add(first, second)
    desk.submit(), desk.submit()
    desk.scheduler.abort("a")
    plan = desk.submit()
    assert plan is not None
    assert [plan.rows.slots_R.tolist(), plan.rows.generations_R.tolist()] == [[0], [2]]
    assert len(desk.scheduler.in_flight) == 3
    desk.finish()
    assert desk.got == {"a": [], "b": desk.alone(second)}


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["early", "late"])
def test_a_fault_of_the_device_changes_nobodys_tokens(fault: str) -> None:
    desk = Desk()
    requests = [make_request(name, (*PROMPT, ord(name) % 4)) for name in "abc"]
    desk.add(*requests)
    desk.submit(), desk.submit(), desk.deliver()
    desk.worker.fail_next = fault
    desk.submit()
    desk.deliver(), desk.deliver()
    assert desk.submit() is not None
    desk.finish()
    assert desk.got == {request.id: desk.alone(request) for request in requests}
    assert {reason for reason, _ in desk.ended.values()} == {"length"}


def test_after_a_failure_plans_are_dropped_and_the_next_one_resets() -> None:
    desk = Desk()
    desk.add(make_request("a", PROMPT))
    desk.submit(), desk.submit()
    desk.worker.fail_next = "late"
    assert desk.deliver() == []
    assert desk.submit() is None, "plans in flight must drain first"
    assert desk.deliver() == []
    plan = desk.submit()
    assert plan is not None
    assert plan.reset
    assert len(desk.scheduler.cache.index) == 2, "only what the new plan writes"
    desk.finish()


def test_blocks_of_a_failed_plan_cannot_be_found() -> None:
    desk, request = Desk(), make_request("a", PROMPT)
    desk.add(request)
    desk.submit()
    assert len(desk.scheduler.cache.index) == 2
    desk.worker.fail_next = "late"
    desk.deliver()
    desk.scheduler.abort("a")
    assert desk.submit() is None
    assert len(desk.scheduler.cache.index) == 0
    desk.finish()


def test_a_request_that_kills_every_plan_ends_alone() -> None:
    desk = Desk()
    requests = [make_request(name, PROMPT[: 3 + i]) for i, name in enumerate("abcd")]
    desk.worker.poison = {requests[2].seed}
    desk.add(*requests)
    desk.finish()
    assert desk.ended.pop("c") == ("error", "a fault was asked for")
    assert desk.ended == dict.fromkeys("abd", ("length", None))
    assert all(desk.got[request.id] == desk.alone(request) for request in requests if request.id != "c")


# ---- what may be shared, and when -----------------------------------------------------------------------------------


def test_a_prompt_is_found_by_its_twin_in_the_same_plan_and_in_the_next() -> None:
    desk = Desk()
    requests = [make_request(name, PROMPT) for name in "abc"]
    desk.add(*requests[:2])
    desk.submit()
    desk.add(requests[2])
    desk.submit()
    cached = {seq.request.id: seq.cached_tokens for seq in desk.scheduler._by_id.values()}
    assert cached == {"a": 0, "b": 8, "c": 8}
    desk.finish()
    assert desk.got == {request.id: desk.alone(request) for request in requests}


def test_rows_of_a_step_of_single_tokens_read_nothing_that_the_step_writes() -> None:
    desk = Desk(budget=7)
    requests = [make_request("a", PROMPT[:8]), make_request("b", PROMPT[:9])]
    desk.add(requests[0])
    assert desk.submit().num_tokens == 7
    desk.add(requests[1])  # the last token of its twin's second block and its own last token would make one plan
    desk.finish()
    assert desk.got == {request.id: desk.alone(request) for request in requests}


@pytest.mark.parametrize("block_size", [1, 4])
def test_generated_blocks_are_found_once_the_plan_that_wrote_them_has_retired(block_size: int) -> None:
    desk, request = Desk(block_size=block_size), make_request("a", (1, 2, 3), max_tokens=12)
    desk.add(request)
    for tokens in range(1, 11):
        desk.submit()
        written = 3 + tokens - 1
        retired = max(3, written - 1) if tokens > 1 else 3
        assert len(desk.scheduler.cache.index) == retired // block_size
        desk.deliver()
        assert len(desk.scheduler.cache.index) == written // block_size
    desk.finish()


def test_what_a_plan_wrote_after_the_end_is_never_cached() -> None:
    free = make_request("a", (1, 2, 3), max_tokens=20)
    output = Desk().alone(free)
    stop = next(token for i, token in enumerate(output) if i >= 4 and token not in output[:i])
    desk, request = Desk(block_size=1), make_request("a", (1, 2, 3), max_tokens=20, stop_ids=frozenset([stop]))
    desk.add(request)
    desk.finish(depth=2)
    assert desk.got["a"] == desk.alone(request)
    assert len(desk.scheduler.cache.index) == 3 + len(desk.got["a"]) - 1


def cached(desk: Desk, name: str) -> int:
    """Tokens that a request just planned found in the cache."""
    return desk.scheduler._by_id[name].cached_tokens


@pytest.mark.parametrize("groups", [((None, 1),), ((None, 2), (6, 3)), ((5, 1),)])
def test_a_conversation_goes_on_from_its_last_token_and_branches_off_anywhere_in_its_last_block(groups: Groups) -> None:
    desk, first = Desk(groups=groups), make_request("a", PROMPT, max_tokens=9)
    desk.add(first)
    desk.finish()
    known = (*PROMPT, *desk.got["a"])  # 19 tokens; the keys of the last were never written
    goes_on, same = make_request("b", (*known, 1, 2)), make_request("c", PROMPT)
    branches = make_request("d", (*known[:17], known[17] + 1, 1))
    desk.add(goes_on, same, branches)
    plan = desk.submit()
    assert plan is not None
    assert [cached(desk, name) for name in "bcd"] == [18, 9, 17]
    assert plan.rows.num_tokens_R.tolist() == [3, 1, 2]
    assert [len(copy.targets) for copy in plan.copies] == [3] * len(groups)
    desk.finish()
    assert all(desk.got[request.id] == desk.alone(request) for request in (goes_on, same, branches))


@pytest.mark.parametrize(("length", "max_tokens"), [(4, 9), (8, 1), (8, 5)])
def test_a_block_that_an_end_filled_exactly_is_branched_off_too(length: int, max_tokens: int) -> None:
    desk, prompt = Desk(), PROMPT[:length]
    desk.add(make_request("a", prompt, max_tokens=max_tokens))
    desk.finish()
    known = (*prompt, *desk.got["a"])
    written = len(known) - 1
    assert written % 4 == 0
    for name, kept in (("b", written - 2), ("c", length - 1)):
        desk.add(branch := make_request(name, (*known[:kept], known[kept] % 3 + 1, 1)))
        desk.submit()
        assert cached(desk, name) == kept
        desk.finish()
        assert desk.got[name] == desk.alone(branch)


def test_a_block_is_not_copied_across_salts_nor_without_the_prefix_cache() -> None:
    desk, other = Desk(), make_request("b", PROMPT, salt="b")
    desk.add(make_request("a", PROMPT))
    desk.finish()
    desk.add(other)
    desk.submit()
    assert cached(desk, "b") == 0
    desk.finish()
    desk.scheduler.cache.names.prefix_caching = False
    desk.add(make_request("c", PROMPT))
    desk.submit()
    assert cached(desk, "c") == 0
    desk.finish()


def test_what_an_aborted_request_has_not_written_for_certain_is_not_taken_over() -> None:
    desk, request = Desk(), make_request("a", PROMPT, max_tokens=12)
    desk.add(request)
    desk.submit(), desk.submit(), desk.deliver(), desk.submit()
    assert desk.scheduler.abort("a")  # one token is known, two plans that write more are in flight
    followed = make_request("b", (*PROMPT, *desk.alone(request)[:8]))
    desk.add(followed)
    desk.submit()
    assert cached(desk, "b") == len(PROMPT)
    desk.finish()
    assert desk.got["b"] == desk.alone(followed)


def test_tokens_that_the_caller_takes_back_are_not_taken_over() -> None:
    desk, request = Desk(), make_request("a", PROMPT, max_tokens=12)
    desk.add(request)
    for _ in range(5):
        desk.submit(), desk.deliver()
    assert desk.scheduler.abort("a", at_token=1)
    followed = make_request("b", (*PROMPT, *desk.got["a"]))
    desk.add(followed)
    desk.submit()
    assert cached(desk, "b") == 12  # by then a full block, which is found by its hash alone
    desk.finish()
    assert desk.got["b"] == desk.alone(followed)
    index = desk.scheduler.cache.index
    assert len(list(index.published())) == len(index), "every block has one name"


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_request_that_its_caller_ends_has_given_the_tokens_the_caller_keeps(kept: int) -> None:
    desk, request = Desk(), make_request("a", PROMPT, max_tokens=12)
    counted: list[int] = []
    desk.scheduler.on_finish = lambda _, stats: counted.append(stats.output_tokens)
    desk.add(request)
    for _ in range(4):
        desk.submit(), desk.deliver()
    assert desk.scheduler.abort("a", at_token=kept)
    assert counted == [kept]
    desk.finish()


def test_what_a_preempted_request_has_not_written_again_is_not_taken_over() -> None:
    desk = Desk(budget=4, block_size=16)
    request = make_request("a", PROMPT, max_tokens=12)
    desk.add(request)
    for _ in range(5):
        desk.submit(), desk.deliver()
    [seq] = desk.scheduler._by_id.values()
    desk.scheduler._preempt(seq, Preemption.BLOCKS)
    desk.scheduler.cache.forget_all()
    desk.submit(), desk.deliver()  # the first four tokens, once more
    assert (cached(desk, "a"), len(desk.got["a"])) == (0, 3)
    desk.scheduler.abort("a")
    desk.add(follow := make_request("b", (*PROMPT, *desk.got["a"])))
    desk.submit()
    assert cached(desk, "b") == 0
    desk.finish()
    assert desk.got["b"] == desk.alone(follow)


def test_a_block_that_a_window_has_passed_is_no_end() -> None:
    """Plans in flight let go of it; the group of full attention still has its own."""
    desk = Desk(groups=((None, 1), (2, 1)), block_size=2)
    desk.add(request := make_request("a", PROMPT[:5], max_tokens=12))
    desk.submit(), desk.deliver()
    for _ in range(4):
        desk.submit()
    [seq] = desk.scheduler._by_id.values()
    assert (seq.written, seq.blocks[0][2] == NULL_BLOCK, seq.blocks[1][2] == NULL_BLOCK) == (5, False, True)
    desk.scheduler.abort("a")
    desk.add(follow := make_request("b", (*PROMPT[:5], *desk.alone(request)[:3])))
    desk.submit()
    assert cached(desk, "b") == 4
    desk.finish(depth=5)
    assert desk.got["b"] == desk.alone(follow)


@pytest.mark.parametrize("fault", ["early", "late"])
def test_a_copy_of_a_failed_plan_is_made_again(fault: str) -> None:
    desk = Desk()
    desk.add(make_request("a", PROMPT))
    desk.finish()
    follow = make_request("b", (*PROMPT, *desk.got["a"], 3, 2, 1))
    desk.add(follow)
    desk.worker.fail_next = fault
    desk.submit()
    assert cached(desk, "b") == 17
    desk.deliver()
    plan = desk.submit()
    assert plan is not None
    assert (plan.reset, cached(desk, "b"), len(plan.copies)) == (True, 17, 1)
    desk.finish()
    assert desk.got["b"] == desk.alone(follow)


def test_a_longer_end_takes_the_place_of_the_one_it_begins_with() -> None:
    """Otherwise a search that adds a token a round would fill the cache with its own past."""
    desk, tokens = Desk(block_size=16), PROMPT[:2]
    for name in "abcdefgh":
        desk.add(make_request(name, tokens, max_tokens=1))
        desk.finish()
        tokens = (*tokens, desk.got[name][0])
        assert len(list(desk.scheduler.cache.index.published())) == 1


def test_a_freed_block_is_not_quiet_until_the_last_plan_naming_it_has_retired() -> None:
    desk, request = Desk(), make_request("a", PROMPT)
    desk.add(request)
    desk.submit(), desk.submit()
    [seq] = desk.scheduler.in_flight[0].seqs
    blocks, pool = list(seq.blocks[0]), desk.scheduler.cache.pool

    def quiet() -> set[bool]:
        return {pool.is_quiet(0, block, desk.scheduler._retired) for block in blocks}

    desk.scheduler.abort("a")
    assert quiet() == {False}
    desk.deliver()
    assert quiet() == {False}
    desk.deliver()
    assert quiet() == {True}


# ---- lookahead ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize(("lookahead", "in_flight"), [(0, 1), (1, 2), (2, 2)])
def test_lookahead_bounds_how_far_a_request_runs_ahead(lookahead: int, in_flight: int, before: int) -> None:
    """before: plans of its neighbour's alone."""
    desk, neighbour = Desk(), make_request("b", PROMPT[:5], max_tokens=12)
    mask = Alternating() if lookahead == 1 else None
    request = make_request("a", PROMPT, lookahead=lookahead, mask=mask)
    desk.add(neighbour)
    for _ in range(before):
        desk.submit(), desk.deliver()
    desk.add(request)
    most = 0
    while desk.scheduler.has_work:
        while len(desk.scheduler.in_flight) < 2 and desk.submit():
            most = max(most, desk.rows_of("a"))
        desk.deliver()
    assert most == in_flight
    assert desk.got == {"a": desk.alone(request, Alternating() if mask else None), "b": desk.alone(neighbour)}


def test_a_mask_is_computed_from_every_token_before_it() -> None:
    """`Alternating` refuses a token out of turn, and the ideal worker a mask that comes too early."""
    desk = Desk()
    masked = make_request("a", PROMPT, max_tokens=9, lookahead=1, mask=Alternating())
    free = make_request("b", PROMPT, max_tokens=9)
    desk.add(masked, free)
    desk.finish()
    assert [token % 2 for token in desk.got["a"]] == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert desk.got["b"] == desk.alone(free)


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("fault", ["accept", "allowed", "nothing"])
def test_a_mask_that_fails_ends_its_own_request_only(fault: str, at: int) -> None:
    desk = Desk()
    broken = make_request("a", PROMPT, lookahead=1, mask=Alternating(fault, at))
    requests = [make_request("b", PROMPT), make_request("c", PROMPT, lookahead=1, mask=Alternating())]
    desk.add(broken, *requests)
    desk.finish()
    reason, error = desk.ended["a"]
    assert reason == "error"
    assert "token mask" in (error or "")
    assert desk.got["a"] == desk.alone(broken, Alternating())[: at + (fault == "accept")]
    assert desk.got["b"] == desk.alone(requests[0])
    assert desk.got["c"] == desk.alone(requests[1], Alternating())


def test_a_mask_of_a_strange_kind_ends_its_own_request_only() -> None:
    class Strange(Alternating):
        def allowed(self) -> np.ndarray:
            return [True] * VOCAB  # type: ignore[return-value]

    desk, innocent = Desk(), make_request("b", PROMPT)
    desk.add(make_request("a", PROMPT, lookahead=1, mask=Strange()), innocent)
    desk.finish()
    assert desk.ended["a"][0] == "error"
    assert desk.got["b"] == desk.alone(innocent)


# ---- guidance: two sequences, one request ---------------------------------------------------------------------------

NEGATIVE = [3, 1, 1, 2, 1, 3]


def guided_request(name: str, prompt: tuple[int, ...] = PROMPT, **options: Any) -> Request:
    return make_request(name, prompt, guidance_scale=1.5, negative_prompt=NEGATIVE, **options)


@pytest.mark.parametrize("budget", [2, 3, 7, 15, 16])
def test_both_sequences_of_a_guided_request_come_to_their_end_in_one_plan(budget: int) -> None:
    """The prompt has 10 tokens, the negative one 6: they sample together, and from then on run ahead like others."""
    desk, request = Desk(budget=budget, slots=2), guided_request("a")
    desk.add(request)
    fed, plans = 0, []
    while fed < len(PROMPT) + len(NEGATIVE):
        plans.append(desk.submit())
        fed += plans[-1].num_tokens
        desk.deliver()
    assert [plan.rows.num_logits_R.sum() for plan in plans] == [0] * (len(plans) - 1) + [2]
    assert (desk.scheduler.num_running, desk.scheduler.num_waiting) == (1, 0), "it is one request"
    assert (desk.submit().num_tokens, desk.submit().num_tokens, desk.rows_of("a")) == (2, 2, 2)
    desk.finish()
    assert desk.got["a"] == desk.alone(request)
    assert desk.got["a"] != desk.alone(make_request("a", PROMPT))


def test_a_guided_request_waits_for_two_slots_and_nobody_overtakes_it() -> None:
    desk = Desk(slots=2)
    requests = [make_request("a", PROMPT, max_tokens=3), guided_request("b"), make_request("c", PROMPT, max_tokens=3)]
    desk.add(*requests)
    desk.submit()
    assert (desk.scheduler.num_running, desk.scheduler.num_waiting) == (1, 2)
    ended: list[str] = []
    desk.scheduler.on_finish = lambda request, _: ended.append(request.id)
    while "b" not in ended:
        desk.submit(), desk.deliver()
    assert ended == ["a", "b"]
    desk.finish()
    assert desk.got == {request.id: desk.alone(request) for request in requests}


def test_who_begins_is_told_with_the_plan_and_once() -> None:
    """However often it is preempted: the server must know who may have ended its engine."""
    desk, begun = Desk(slots=2), list[list[str]]()
    desk.scheduler.on_begin = lambda requests: begun.append([request.id for request in requests])
    desk.add(make_request("a", PROMPT, max_tokens=3), make_request("b", PROMPT[:3]), guided_request("c"))
    assert begun == []
    desk.submit()
    assert begun == [["a", "b"]]
    desk.scheduler._preempt(desk.scheduler.in_flight[0].seqs[0], Preemption.BLOCKS)
    desk.finish()
    assert begun == [["a", "b"], ["c"]]


def test_of_a_guided_request_late_tokens_are_dropped_after_an_abort_and_count_after_a_preemption() -> None:
    desk = Desk(slots=6)
    requests = [guided_request("a"), guided_request("b", PROMPT[::-1]), make_request("c", PROMPT)]
    desk.add(*requests)
    desk.submit(), desk.submit()
    desk.scheduler.abort("a")
    desk.scheduler._preempt(desk.scheduler._by_id["b"], Preemption.BLOCKS)
    assert (desk.scheduler.num_running, desk.scheduler.num_waiting, desk.scheduler.slots.num_free) == (1, 1, 5)
    desk.deliver(), desk.deliver()
    assert desk.got["a"] == []
    assert desk.got["b"] == desk.alone(requests[1])[:2]
    desk.finish()
    assert [desk.got[name] for name in "bc"] == [desk.alone(request) for request in requests[1:]]


@pytest.mark.parametrize("fault", ["early", "late"])
def test_a_guided_request_comes_through_a_fault_and_ends_alone_if_it_is_the_cause(fault: str) -> None:
    desk = Desk(slots=6)
    requests = [guided_request("a"), make_request("b", PROMPT), guided_request("c", PROMPT[:3])]
    desk.add(*requests)
    desk.submit(), desk.submit(), desk.deliver()
    desk.worker.fail_next = fault
    desk.submit(), desk.deliver(), desk.deliver()
    desk.worker.poison = {requests[2].seed}
    desk.finish()
    assert desk.ended == {"a": ("length", None), "b": ("length", None), "c": ("error", "a fault was asked for")}
    assert [desk.got[name] for name in "ab"] == [desk.alone(request) for request in requests[:2]]


def test_guided_requests_find_both_prompts_in_the_cache() -> None:
    desk = Desk(slots=8)
    desk.add(guided_request("a"))
    desk.finish()
    before = desk.scheduler.cache.hit_tokens
    desk.add(guided_request("b"), guided_request("c", PROMPT[::-1]))
    desk.finish()
    assert desk.scheduler.cache.hit_tokens - before == (9 + 5) + 5  # all but what must run


def test_what_a_guided_request_can_never_run_in_is_refused() -> None:
    def refusal(request: Request, *, pages: int = 33, **settings: int) -> tuple[str, str | None]:
        layout = layout_of(((None, 1),), 4, pages)
        config = EngineConfig(**{"max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 64, **settings})
        with pytest.raises(InvalidRequest) as raised:
            Engine(config, layout, IdealWorker(layout), vocab_size=VOCAB).check(request)
        return str(raised.value), raised.value.param

    assert refusal(guided_request("a"), max_num_seqs=1)[1] == "guidance_scale"
    assert refusal(guided_request("a"), pages=9)[1] == "max_tokens", "18 and 14 tokens are 9 blocks of 4"
    long = make_request("a", PROMPT, guidance_scale=2.0, negative_prompt=[1] * 32)
    assert refusal(long) == (
        "the negative prompt has 32 tokens and the context holds 32 including the output; shorten it.",
        "negative_prompt",
    )
    assert refusal(make_request("a", PROMPT, guidance_scale=2.0, negative_prompt=[1] * 27))[1] == "max_tokens"
    assert refusal(make_request("a", PROMPT, guidance_scale=2.0, negative_prompt=[9]))[1] == "negative_prompt"


# ---- a request that runs alone fits, wherever its blocks lie --------------------------------------------------------

SPLIT: Groups = ((None, 6), (3, 1), (4, 1))  # one block of the first group fills a page, six of the others do


def test_a_request_alone_gives_up_the_cache_when_its_blocks_straddle_pages() -> None:
    """Both windows lie across two pages when the first group needs the last one."""
    request = make_request("a", (1, 2, 3), max_tokens=12)
    desk = Desk(groups=SPLIT, block_size=1, pages=18, slots=1, budget=2)
    assert desk.layout.pages_needed(15, 2) == 17
    preemptions = []
    desk.scheduler.on_finish = lambda _, stats: preemptions.append(stats.preemptions)
    desk.add(request)
    desk.finish()
    assert desk.got["a"] == desk.alone(request)
    assert preemptions == [1]


def test_a_scored_prompt_alone_gives_up_the_cache_too() -> None:
    """It always starts from nothing, so without giving up something it would come to the same end again."""
    request = make_request("a", (1, 2, 3, 1, 1, 2, 2, 3, 3, 1, 2, 1, 3, 3), max_tokens=1)
    request = replace(request, params=request.params.replace(prompt_logprobs=0))
    desk = Desk(groups=SPLIT, block_size=1, pages=18, slots=1, budget=1)
    desk.add(request)
    desk.finish()
    assert desk.got["a"] == desk.alone(request)


def test_a_hit_scattered_over_the_whole_pool_is_given_up() -> None:
    prompt = (1, 2, 3, 1, 1, 2, 2, 3, 3, 1, 2, 1, 3)
    desk = Desk(groups=SPLIT, block_size=1, pages=18, slots=1, budget=2)
    first, second = make_request("a", prompt, max_tokens=1), make_request("b", (*prompt, 1), max_tokens=1)
    desk.add(first)
    desk.finish()
    desk.add(second)
    desk.finish()
    assert desk.scheduler.cache.hit_tokens == 0
    assert desk.got == {"a": desk.alone(first), "b": desk.alone(second)}


# ---- rehearsals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_rehearsal_leaves_nothing_behind(block_size: int) -> None:
    layout, request = layout_of(((None, 1),), block_size, 33), make_request("a", PROMPT)
    config = EngineConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, debug_checks=True)
    engine = Engine(config, layout, IdealWorker(layout), vocab_size=VOCAB)
    engine.rehearse()
    assert not engine.has_work
    assert engine.headroom == Headroom()
    pool = engine.scheduler.cache.pool
    assert pool.free_pages == pool.num_pages
    engine.add(request)
    events = [event for _ in range(20) for event in engine.step()]
    assert [event.token_id for event in events] == alone(request, layout)
    assert {event.request_id for event in events} == {"a"}


@pytest.mark.parametrize(("context", "outputs"), [(2, []), (3, [2] * 12), (10, [2] * 12), (64, [2] * 12)])
def test_a_rehearsal_fits_any_context_and_decodes(context: int, outputs: list[int]) -> None:
    """A first token comes from a prompt, a second from a step of another kind."""
    layout = layout_of(((None, 1),), 4, 33)
    config = EngineConfig(max_model_len=context, max_num_seqs=4, max_num_batched_tokens=64)
    engine, ended = Engine(config, layout, IdealWorker(layout), vocab_size=VOCAB), list[int]()
    engine.on_finish(lambda _, stats: ended.append(stats.output_tokens))
    engine.rehearse()
    assert ended == outputs


# ---- scored prompts, windows ----------------------------------------------------------------------------------------


def test_a_scored_prompt_is_not_run_again_for_what_was_told_already() -> None:
    """Preempted while it decodes it finds its prompt in the cache; halfway through, what was scored of it."""
    for steps, found in ((4, 29), (2, 16)):
        desk = Desk(budget=8)
        request = make_request("a", (*PROMPT, *PROMPT[::-1], *PROMPT[:9]), prompt_logprobs=0)
        desk.add(request)
        told: list[float] = []
        for _ in range(steps):
            desk.submit()
            told += _scores(desk.deliver())
        desk.scheduler._preempt(desk.scheduler._by_id["a"], Preemption.BLOCKS)
        desk.submit()
        assert cached(desk, "a") == found
        for _ in range(20):
            if desk.scheduler.in_flight:
                told += _scores(desk.deliver())
            desk.submit()
        desk.finish()
        assert told == list(range(1, 29)), "each prompt token once, in order"
        assert desk.got["a"] == desk.alone(request)


def _scores(events: list[TokenEvent]) -> list[float]:
    return [entry.logprob for event in events for entry in event.prompt_logprobs or ()]


def test_a_prompt_under_a_window_needs_room_for_a_piece_of_it_alone() -> None:
    """Prompts of 6,000 tokens with a window of 8 and steps as long as they: a step takes as much as there is room for.
    Whole a prompt would need 375 blocks, and there are 200; two pieces of 1,024 fit beside each other."""
    prompts = [tuple(1 + (n * n + shift) % 3 for n in range(6000)) for shift in range(3)]
    desk = Desk(groups=((8, 1),), pages=201, block_size=16, budget=6000)
    requests = [make_request(f"r{n}", prompt, max_tokens=40) for n, prompt in enumerate(prompts)]
    desk.add(*requests)
    together = 0
    while desk.scheduler.has_work:
        desk.submit()
        together = max(together, desk.scheduler.num_running)
        desk.deliver()
    assert together == 3
    assert desk.scheduler.preemptions.total() == 0
    assert desk.got == {request.id: desk.alone(request) for request in requests}


# ---- prompt logprobs ------------------------------------------------------------------------------------------------


def test_only_plans_that_feed_a_scored_prompt_ask_for_its_logprobs() -> None:
    """A plan that asks costs its whole batch something; what decodes beside or after it must not."""
    desk = Desk(budget=7)
    scored = make_request("a", PROMPT, max_tokens=9, prompt_logprobs=0)
    desk.add(scored, make_request("b", PROMPT[::-1], max_tokens=14))
    asking = []
    while desk.scheduler.has_work:
        while len(desk.scheduler.in_flight) < 2 and (plan := desk.submit()):
            feeds = any(desk.scheduler.in_flight[-1].seqs[span.row].id == "a" for span in plan.spans)
            assert bool(plan.rows.features & Feature.PROMPT_LOGPROBS) == feeds
            asking.append(feeds)
        desk.deliver()
    assert asking.count(True) == 2, "ten tokens in chunks of seven"
    assert asking.count(False) > 8
    assert desk.got["a"] == desk.alone(scored)


def test_a_scored_prompt_asks_no_more_once_it_is_fed_even_where_nothing_else_is_asked() -> None:
    desk = Desk()
    desk.add(make_request("a", PROMPT, temperature=0, prompt_logprobs=0))
    plans = [desk.submit(), desk.submit()]
    assert [plan.rows.features for plan in plans if plan] == [Feature.PROMPT_LOGPROBS, Feature.NONE]
    desk.finish()


def test_more_stop_ids_than_the_device_holds_are_refused_before_any_step() -> None:
    layout = layout_of(((None, 1),), 4, 33)
    config = EngineConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)
    engine = Engine(config, layout, IdealWorker(layout), vocab_size=VOCAB)
    most = make_request("a", PROMPT, stop_ids=frozenset(range(100, 100 + MAX_STOP_IDS - 1)))  # and the model's own
    engine.check(most)
    with pytest.raises(InvalidRequest, match="65 token ids end the request, the model's own included; at most 64 can"):
        engine.check(replace(most, stop_ids=most.stop_ids | {99}))


# ---- no row too many, no request past one that is held up -----------------------------------------------------------


@pytest.mark.parametrize("lookahead", [2, 0])
def test_a_request_has_a_row_for_each_of_its_tokens_and_none_after_the_last(lookahead: int) -> None:
    desk = Desk()
    desk.add(make_request("a", PROMPT, max_tokens=5, lookahead=lookahead), make_request("b", PROMPT, max_tokens=20))
    rows = 0
    while desk.scheduler.has_work:
        while len(desk.scheduler.in_flight) < 2 and desk.submit():
            rows += sum(seq.id == "a" for seq in desk.scheduler.in_flight[-1].seqs)
        desk.deliver()
    assert rows == 5, "the prompt's, and one for each token but the last"


def test_nobody_is_admitted_past_a_prompt_that_is_held_up() -> None:
    """The second prompt goes on by four blocks, and three are free; the third would start with one and two to spare."""
    desk = Desk(pages=31, budget=16)
    first, second, third = (
        make_request("a", (1, 2), max_tokens=30),
        make_request("b", PROMPT * 3),
        make_request("c", (3,)),
    )
    desk.add(first, second)
    desk.submit(), desk.deliver()
    [held] = desk.scheduler.cache.pool.take([desk.scheduler.cache.pool.free_pages - 3])  # as if others had them
    desk.add(third)
    desk.submit()
    assert {seq.id for seq in desk.scheduler.in_flight[-1].seqs} == {"a"}
    for block in held:
        desk.scheduler.cache.pool.release(0, block, 0)
    desk.finish()
    assert desk.got == {request.id: desk.alone(request) for request in (first, second, third)}


def test_who_found_no_room_is_not_tried_again_before_somebody_gave_something_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each try searches the cache for the whole prompt."""
    desk = Desk(pages=17)
    running = [make_request("a", PROMPT * 3, max_tokens=6), make_request("b", PROMPT[::-1] * 2, max_tokens=9)]
    desk.add(*running)
    desk.submit(), desk.deliver()
    desk.add(waiting := make_request("c", (3, *PROMPT * 3)))
    tries: list[object] = []
    admit = desk.scheduler.cache.admit
    monkeypatch.setattr(desk.scheduler.cache, "admit", lambda *a, **k: tries.append(a) or admit(*a, **k))
    while "a" not in desk.ended:
        desk.submit(), desk.deliver()
    assert len(tries) == 1
    desk.submit(), desk.deliver()
    assert desk.got["c"], "it starts as soon as there is room"
    assert len(tries) == 2
    desk.finish()
    assert desk.got == {request.id: desk.alone(request) for request in (*running, waiting)}


def test_forty_requests_that_fail_whatever_step_they_are_in_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are tried one after the other, which is forty failed steps in a row; the device is not to blame."""
    layout = layout_of(((None, 1),), 4, 999)
    config = EngineConfig(max_model_len=64, max_num_seqs=64, max_num_batched_tokens=1024)
    worker = IdealWorker(layout)
    engine = Engine(config, layout, worker, vocab_size=VOCAB)
    healthy = make_request("healthy", PROMPT)
    bad = [make_request(f"bad {n}", (*PROMPT, n % 4)) for n in range(40)]
    worker.poison = {request.seed for request in bad} - {healthy.seed}
    for request in (*bad, healthy):
        engine.add(request)
    events = [event for _ in range(200) for event in engine.step()]
    assert {event.request_id for event in events if event.finish_reason == "error"} == {request.id for request in bad}
    assert [event.token_id for event in events if event.request_id == "healthy"] == alone(healthy, layout)
    monkeypatch.setattr("ridgeline.engine.engine.FAILING_SECONDS", 0.0)
    engine.add(replace(bad[0], id="once more"))
    for request in bad:
        engine.add(request)
    with pytest.raises(DeviceLost, match="32 steps in a row failed"):
        [engine.step() for _ in range(200)]
