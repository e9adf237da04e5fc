"""A leader over ranks that compute nothing: what it takes for an end of the group, and what it does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from ridgeline.core.plan.step import Feature, Rows, StepPlan
from ridgeline.ranks import leader, members, recruits
from ridgeline.ranks.leader import Group
from tests.ranks.fake_rank import STEP

pytestmark = pytest.mark.usefixtures("forked_ranks")

LIMIT = 1.1  # seconds; two steps last longer
Start = Callable[..., Group]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Returns a function that starts a group of two ranks with a fault."""
    monkeypatch.setattr(recruits, "MODULE", "tests.ranks.fake_rank")
    groups: list[Group] = []

    def begin(fault: str, limit: float = 60.0) -> Group:
        monkeypatch.setenv("FAKE_RANK", fault)
        groups.append(Group({}, 2, limit, None))
        return groups[-1]

    yield begin
    for group in groups:
        group.shutdown()


def plan(number: int) -> StepPlan:
    none = np.zeros(0, np.int32)
    return StepPlan(number, Rows(none, none, none, none, none, 1, Feature.NONE, 0), np.zeros(0, np.int64))


def test_a_rank_may_take_longer_to_start_than_between_signs_of_life(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "SILENCE", 2.0)  # an import may hold a rank's interpreter for a moment
    assert start("starts late").facts.max_seqs == 4


def test_a_limit_counts_from_when_a_step_could_begin(start: Start) -> None:
    """Three plans that are submitted at once take longer than the limit of one."""
    group = start("slow", LIMIT)
    for number in range(3):
        group.submit(plan(number))
    assert [group.collect().error for _ in range(3)] == [None] * 3


def test_a_limit_counts_from_when_masks_came(start: Start) -> None:
    group = start("waits for masks", LIMIT)
    group.submit(plan(0))
    time.sleep(STEP)
    group.provide_masks(0, {})
    assert group.collect().error is None


def test_a_result_that_came_in_time_counts_whenever_it_is_asked_for(start: Start) -> None:
    """The consumer of a stream may pause for hours while a plan is under way."""
    group = start("none", 0.5)
    group.submit(plan(0))
    time.sleep(1.5)
    assert group.collect().error is None


def test_a_step_that_lasts_too_long_is_the_end(start: Start) -> None:
    group = start("slow", STEP / 3)
    group.submit(plan(0))
    result = group.collect()
    assert result.device_lost
    assert "a step was not done within 0.2 s" in (result.error or "")


def test_a_rank_may_say_later_than_the_first_that_a_plan_failed(start: Start) -> None:
    """Its result of the plan before comes late too, and is not the answer to the plan that failed."""
    group = start("fails the second, one rank late")
    for number in range(3):
        group.submit(plan(number))
    results = [group.collect() for _ in range(3)]
    assert [(result.error, result.dropped) for result in results] == [(None, False), ("wrong", False), (None, True)]


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("garbage", "rank 1 sent what is no message"),
        ("truncated", "rank 1 ended with code 3"),
        ("huge", "rank 1 closed its connection"),
    ],
)
def test_what_is_no_message_is_the_end(fault: str, sentence: str, start: Start) -> None:
    group = start(fault)
    group.submit(plan(0))
    errors, deadline = [group.collect().error], time.monotonic() + 20
    while errors[-1] is None and time.monotonic() < deadline:  # the first rank's result may come first
        group.submit(plan(len(errors)))
        errors.append(group.collect().error)
    assert sentence in (errors[-1] or "")
    assert group._lost


def test_a_rank_that_alone_has_no_memory_for_a_step_is_the_end(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "AGREEMENT", 0.3)
    group = start("one has no memory")
    errors, deadline = list[str | None](), time.monotonic() + 20
    while not (errors and errors[-1]) and time.monotonic() < deadline:  # the first rank's result may come first
        group.submit(plan(len(errors)))
        errors.append(group.collect().error)
    assert "rank 1 alone failed" in (errors[-1] or "")
    assert "out of memory" in (errors[-1] or "")
    assert group._lost


def test_a_step_for_which_no_rank_has_memory_fails_alone(start: Start) -> None:
    """As on one device: the engine may run it again with fewer rows."""
    group = start("none has memory")
    group.submit(plan(0))
    result = group.collect()
    assert result.out_of_memory
    assert not result.device_lost
    assert not group._lost
