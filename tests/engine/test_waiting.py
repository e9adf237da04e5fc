"""The queue of waiting requests, where lanes come and go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ridgeline.engine.policy.drr import DRR
from ridgeline.engine.sequence import Status
from ridgeline.engine.waiting import Lane, WaitingQueue


class ByName:
    """Lanes by a request's name, in the order of its number."""

    def lane(self, seq: Any) -> str:
        return seq.name

    def new_lane(self, name: Any) -> Lane:
        return Lane(name)

    def place(self, seq: Any) -> tuple:
        return seq.order


def test_a_request_comes_back_to_a_place_that_a_lane_now_gone_had() -> None:
    queue = WaitingQueue(ByName())
    late, early, other = (
        SimpleNamespace(name=name, order=(n,), status=None) for name, n in (("a", 5), ("a", 3), ("b", 4))
    )
    for seq in (late, early, other):
        queue.push(seq)
    assert queue.head() is early
    late.status = early.status = Status.RUNNING  # as the lane's requests start, it goes
    assert queue.head() is other
    assert set(queue.lanes) == {"b"}
    queue.push(late)  # preempted: its old entry still lies behind the other's
    assert list(queue.heads()) == [other, late]
    assert queue.head() is other


def test_places_that_fell_are_found_once_lanes_are_sorted() -> None:
    """As those of tenants do when the quantum of turns grows."""
    queue, turns = WaitingQueue(ByName()), {"a": 5, "b": 7, "c": 6}
    policy = queue._policy
    policy.place = lambda seq: (turns[seq.name],)  # type: ignore[method-assign]
    first, second, gone = (SimpleNamespace(name=name, order=(0,), status=None) for name in "abc")
    for seq in (first, second, gone):
        queue.push(seq)
    assert queue.head() is first
    gone.status = Status.RUNNING
    turns["b"] = 3
    queue.sort()
    assert list(queue.heads()) == [second, first]
    assert set(queue.lanes) == {"a", "b"}


def test_quanta_of_turns_are_half_of_the_dearest_prompt_or_less_and_grow_seldom() -> None:
    policy, grown = DRR(), 0
    policy.price = SimpleNamespace(prompt=float)  # type: ignore[assignment]
    request = SimpleNamespace(background=False, owner="a")
    for length in range(1, 2000):
        member = SimpleNamespace(tokens=[0] * length)
        policy.come(SimpleNamespace(members=(member,), request=request))  # type: ignore[arg-type]
        grown, policy.fell = grown + policy.fell, False
        policy.spent_T[1] = 1e6
        assert length / 4 < 1e6 / policy.turn(1) <= 1.01 * length / 2
    assert grown == 11  # with 1, 2, 4, … 1,024
