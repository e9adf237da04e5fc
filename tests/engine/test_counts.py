"""Rows that verify drafts emit a count of tokens, from none to their bound.

The ideal worker emits what a script says and writes wrong drafts behind the right ones. The oracle is the request run
alone, one token at a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.request import Preemption, TokenEvent
from ridgeline.core.plan.step import Feature, Finish, RowKind, StepLogprobs, StepResult
from ridgeline.core.settings.config import EngineConfig
from ridgeline.engine.plan_builder import PlanBuilder, Standing
from tests.engine.desk import Desk, make_request
from tests.engine.layouts import GROUPS, Groups, layout_of
from tests.engine.profiles import quick_settings
from tests.engine.test_scheduler_machine import Alternating

PROMPT = (1, 2, 3, 1, 2, 2, 1, 3, 3, 1)
BOUND = 3


def verifying(*counts: int, **options: Any) -> Desk:
    """A desk whose rows emit these numbers of tokens in turn, for any request."""
    desk = Desk(tokens_each=BOUND, **options)
    desk.worker.script = lambda seed, turn, bound: counts[(turn + seed) % len(counts)]
    return desk


def written(desk: Desk, name: str) -> tuple[int, int]:
    """(The host's length of a request's cache, the device's)."""
    slot = desk.scheduler._by_id[name].slot
    return int(desk.scheduler.slots.kv_len[slot]), desk.worker.slots[slot].kv_len


@pytest.mark.few(40)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_every_request_gets_its_own_tokens_whatever_the_rows_emit(groups: Groups, block_size: int, depth: int) -> None:
    desk = verifying(3, 0, 1, 2, 2, 0, 0, 3, groups=groups, block_size=block_size, pages=200)
    requests = [make_request(name, PROMPT[: 3 + n], max_tokens=5 + 4 * n) for n, name in enumerate("abcd")]
    desk.add(*requests)
    desk.finish(depth=depth)
    assert desk.got == {request.id: desk.alone(request) for request in requests}
    assert desk.ended == dict.fromkeys("abcd", ("length", None))


@quick_settings(60)
@given(
    counts=st.lists(st.integers(0, BOUND), min_size=1, max_size=7).filter(any),
    groups=st.sampled_from(GROUPS),
    depth=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    spare=st.integers(0, 6),
)
def test_few_blocks_suffice_and_all_come_back(
    counts: list[int], groups: Groups, depth: int, lengths: list[int], spare: int
) -> None:
    """With hardly more than one request needs the others are preempted, in the middle of what they verify."""
    pages = layout_of(groups, 2, 2).pages_needed(len(PROMPT) + 12 + BOUND - 1, 16) + 1 + spare
    desk = verifying(*counts, groups=groups, block_size=2, pages=pages, budget=16)
    requests = [make_request(str(n), PROMPT[n:], max_tokens=length) for n, length in enumerate(lengths)]
    desk.add(*requests)
    desk.finish(depth=depth)
    assert desk.got == {request.id: desk.alone(request) for request in requests}


def test_a_decode_step_of_rows_that_verify_says_so() -> None:
    desk = verifying(3)
    desk.add(make_request("a", PROMPT), make_request("b", PROMPT[::-1]))
    prompts, drafts = desk.submit(), desk.submit()
    assert prompts is not None
    assert drafts is not None
    assert (prompts.rows.kinds_R.tolist(), prompts.rows.tokens_each) == ([RowKind.CHUNK] * 2, 0)
    assert (drafts.rows.kinds_R.tolist(), drafts.rows.tokens_each) == ([RowKind.VERIFY] * 2, BOUND)
    assert drafts.rows.num_tokens_R.tolist() == drafts.rows.num_logits_R.tolist() == [BOUND] * 2
    desk.finish()


@pytest.mark.parametrize("count", range(BOUND + 1))
def test_lengths_are_corrected_by_what_was_not_emitted(count: int) -> None:
    desk, request = verifying(count), make_request("a", PROMPT, max_tokens=20)
    desk.add(request)
    desk.submit(), desk.submit(), desk.submit()
    desk.deliver()
    assert written(desk, "a")[0] == len(PROMPT) + 2 * BOUND
    desk.deliver()
    assert written(desk, "a")[0] == len(PROMPT) + count + BOUND, "one plan is still in flight"
    desk.deliver()
    assert written(desk, "a") == (len(PROMPT) + 2 * count,) * 2
    assert desk.got["a"] == desk.alone(request)[: 1 + 2 * count]
    desk.worker.script = lambda seed, turn, bound: bound
    desk.finish()
    assert desk.got["a"] == desk.alone(request)


def test_a_stop_in_the_middle_of_a_row_is_the_last_token_that_anybody_hears_of() -> None:
    free = make_request("a", PROMPT, max_tokens=20)
    output = Desk().alone(free)
    at = next(i for i, token in enumerate(output) if i % BOUND == 2 and token not in output[:i])  # 1 + 3 n + 1
    desk, request = verifying(BOUND), replace(free, stop_ids=frozenset([output[at]]))
    desk.add(request)
    desk.finish()
    assert desk.got["a"] == desk.alone(request) == output[: at + 1]
    assert desk.ended == {"a": ("stop", None)}


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_max_tokens_may_be_reached_anywhere_in_a_row(max_tokens: int) -> None:
    desk, request = verifying(BOUND), make_request("a", PROMPT, max_tokens=max_tokens)
    desk.add(request)
    desk.finish()
    assert desk.got["a"] == desk.alone(request)
    assert len(desk.got["a"]) == max_tokens
    assert desk.ended == {"a": ("length", None)}


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_blocks_are_published_as_far_as_tokens_were_accepted(block_size: int) -> None:
    """Neither less nor more: the wrong drafts behind them lie in the same blocks."""
    desk, request = verifying(2, 0, 3, 1, block_size=block_size), make_request("a", (1, 2, 3), max_tokens=20)
    desk.add(request)
    while True:
        while len(desk.scheduler.in_flight) < 2 and desk.submit():
            pass
        desk.deliver()
        if desk.ended:
            break
        accepted = 3 + len(desk.got["a"]) - 1  # the last one's keys are not written yet
        assert len(desk.scheduler.cache.index) == accepted // block_size
    desk.finish()
    twin = make_request("b", [1, 2, 3, *desk.got["a"]], max_tokens=4)
    desk.add(twin)
    desk.submit()
    assert desk.scheduler._by_id["b"].cached_tokens == 3 + len(desk.got["a"]) - 1
    desk.finish()
    assert desk.got["b"] == desk.alone(twin)


def test_who_is_preempted_while_its_drafts_are_verified_goes_on_from_what_was_accepted() -> None:
    desk, request = verifying(2), make_request("a", PROMPT, max_tokens=9)
    desk.add(request)
    desk.submit(), desk.submit(), desk.submit()
    desk.scheduler._preempt(desk.scheduler._by_id["a"], Preemption.BLOCKS)
    desk.deliver(), desk.deliver(), desk.deliver()
    assert desk.got["a"] == desk.alone(request)[:5]
    desk.finish()
    assert desk.got["a"] == desk.alone(request)


def test_pairs_masks_and_paced_requests_run_beside_rows_that_verify() -> None:
    desk = verifying(3, 1, 2, slots=6)
    masked = make_request("m", PROMPT, mask=Alternating())
    guided = make_request("g", PROMPT[:5], guidance_scale=1.5, negative_prompt=[2, 1])
    plain, paced = make_request("p", PROMPT[:3]), make_request("l", PROMPT[1:], lookahead=0)
    desk.add(masked, guided, plain, paced)
    desk.finish()
    assert desk.got.pop("m") == desk.alone(masked, Alternating())
    assert desk.got == {request.id: desk.alone(request) for request in (guided, plain, paced)}


def test_logprobs_come_with_their_tokens_in_order() -> None:
    """Row 0 does not ask for any and emits three tokens, the last of which ends it; row 1 asks and emits two."""
    desk = verifying(2)
    desk.add(make_request("a", PROMPT), make_request("b", PROMPT, logprobs=1))
    desk.submit(), desk.deliver()
    plan = desk.submit()
    assert plan is not None
    assert plan.rows.features & Feature.LOGPROBS
    entries = np.arange(2 * BOUND)
    result = StepResult(
        plan_id=plan.id,
        tokens_RK=np.array([[1, 2, 3], [4, 5, -1]], np.int32),
        emitted_R=np.array([3, 2], np.int32),
        finish_R=np.array([Finish.STOP, Finish.NONE], np.int8),
        logprobs=StepLogprobs(-1.0 * entries, entries, entries[:, None], -1.0 * entries[:, None]),
    )
    events: dict[str, list[TokenEvent]] = {"a": [], "b": []}
    for event in desk.scheduler.update(result):
        events[event.request_id].append(event)
    assert [(event.token_id, event.finish_reason) for event in events["a"]] == [(1, None), (2, None), (3, "stop")]
    assert [event.token_id for event in events["b"]] == [4, 5]
    assert [event.logprobs.rank for event in events["b"] if event.logprobs] == [BOUND, BOUND + 1]


def test_a_row_whose_scores_are_no_numbers_keeps_what_it_emitted_before() -> None:
    desk, request = verifying(BOUND), make_request("a", PROMPT, max_tokens=9)
    desk.add(request)
    desk.submit(), desk.deliver()
    desk.worker.turns_nan.add(request.seed)
    desk.submit(), desk.deliver()
    assert desk.got["a"] == desk.alone(request)[:1]
    desk.finish()
    assert desk.got["a"] == desk.alone(request)


def test_steps_that_could_not_hold_all_rows_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="8 sequences of 3 tokens"):
        EngineConfig(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=23, num_drafts=2)


@pytest.mark.parametrize(
    ("standing", "chunks", "each"),
    [
        ((2, 1), [], 1),
        ((2, 1), [1, 1], 1),
        ((2, 1), [1, 2], 0),
        ((0, 1), [1], 1),
        ((0, 1), [4, 4], 0),
        ((2, 4), [], 4),
        ((2, 4), [4], 0),
        ((2, 4), [1], 0),
    ],
)
def test_rows_say_how_many_tokens_each_of_them_brings(standing: tuple[int, int], chunks: list[int], each: int) -> None:
    """A chunk of one token makes a decode step like any other; longer chunks never do, nor what verifies drafts."""
    desk = Desk(slots=8)
    desk.add(*(make_request(str(n), PROMPT[n:]) for n in range(standing[0] + len(chunks))))
    desk.submit()
    seqs, builder = desk.scheduler.in_flight[0].seqs, PlanBuilder(64, desk.scheduler.slots)
    for seq in seqs[: standing[0]]:
        seq.drafts = standing[1] - 1
    builder.standing = Standing.of(seqs[: standing[0]], desk.scheduler.slots, drafts=standing[1] - 1)
    for seq, count in zip(seqs[standing[0] :], chunks, strict=True):
        builder.add(seq, count, 1, np.ones(count, np.int32))
    _, rows, _ = builder.assemble()
    assert rows.tokens_each == each
    assert rows.kinds_R.tolist().count(RowKind.CHUNK) == len(chunks)
