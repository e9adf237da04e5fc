"""Scores that are not numbers: the request starts over once without shared blocks, and no request finds its blocks."""

from __future__ import annotations

import pytest

from ridgeline.core.plan.request import Preemption, RequestStats
from tests.engine.desk import Desk, make_request
from tests.engine.layouts import GROUPS, Groups

PROMPT = (1, 2, 3, 1, 2, 2, 1, 3, 3, 1)  # two full blocks of four and a rest


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_passing_fault_costs_nobody_a_token(groups: Groups, steps: int) -> None:
    """In the prompt, and while the request decodes; others share its beginning."""
    desk = Desk(groups=groups, pages=99)
    requests = [make_request("a", PROMPT), make_request("b", (*PROMPT, 2)), make_request("c", PROMPT[::-1])]
    ended: dict[str, RequestStats] = {}
    desk.scheduler.on_finish = lambda request, stats: ended.update({request.id: stats})
    desk.add(*requests)
    for _ in range(steps):
        desk.submit(), desk.deliver()
    desk.worker.turns_nan = {requests[0].seed}
    desk.finish()
    assert desk.got == {request.id: desk.alone(request) for request in requests}
    assert {reason for reason, _ in desk.ended.values()} == {"length"}
    assert ended["a"].preempted_for == {Preemption.NOT_NUMBERS: 1}
    assert ended["c"].preemptions == 0


def test_blocks_that_hold_no_numbers_are_found_by_nobody() -> None:
    """Also where their request left before its result came, and after others went on from there."""
    desk = Desk(budget=8)
    lost, follower = make_request("a", PROMPT), make_request("b", (*PROMPT, 3, 3, 2, 1))
    desk.worker.turns_nan = {lost.seed}
    desk.add(lost)
    desk.submit()  # the first two blocks
    desk.scheduler.abort("a")
    desk.deliver()
    assert len(desk.scheduler.cache.index) == 2, "nothing tells of a chunk that samples nothing"
    desk.add(follower)
    desk.finish()
    assert desk.got["b"] == desk.alone(follower)
    assert desk.ended["b"] == ("length", None)
    desk.add(last := make_request("c", (*PROMPT, 3, 3, 2, 1, 1)))
    desk.submit()
    assert desk.scheduler._by_id["c"].cached_tokens == 0
    desk.finish()
    assert desk.got["c"] == desk.alone(last)


def test_what_an_aborted_request_left_behind_is_withdrawn_when_its_result_comes() -> None:
    desk = Desk()
    desk.add(request := make_request("a", PROMPT, max_tokens=12))
    for _ in range(3):
        desk.submit(), desk.deliver()
    desk.worker.turns_nan = {request.seed}
    desk.submit(), desk.submit()
    desk.scheduler.abort("a")
    assert len(desk.scheduler.cache.index) > 0
    desk.deliver(), desk.deliver()
    assert len(desk.scheduler.cache.index) == 0
    desk.finish()


def test_whose_scores_are_never_numbers_ends_with_an_error_and_gives_everything_back() -> None:
    desk = Desk()
    damaged, healthy = make_request("a", PROMPT), make_request("b", PROMPT[::-1])
    desk.add(damaged, healthy)
    while "a" not in desk.ended:
        desk.worker.turns_nan = {damaged.seed}
        desk.submit()
        desk.deliver()
    desk.worker.turns_nan.clear()
    desk.finish()
    assert desk.ended["a"][0] == "error"
    assert "not numbers (NaN)" in str(desk.ended["a"][1])
    assert desk.got == {"a": [], "b": desk.alone(healthy)}
