"""The queue of waiting requests, where lanes come and go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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
