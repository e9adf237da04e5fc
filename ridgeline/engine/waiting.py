"""Requests that wait for a slot, in policy order.

They wait in lanes, one for each tenant or rank, as the policy says. The lanes lie in a heap by the place of their first
request. Places of a lane may move backwards while nothing touches it, as its tenant is served, so an entry is looked at
again when it comes to the top. A step takes the same time with ten requests and with a hundred thousand.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Protocol

from ridgeline.engine.sequence import Sequence, Status


class Lane:
    """Requests in their own order. place: of its first one, when it was last looked at."""

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.place: tuple | None = None
        self._heap: list[tuple[tuple, Sequence]] = []

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (seq.order, seq))

    def head(self) -> Sequence | None:
        """Return the first request. Entries are skipped if their requests wait no more (admitted as suspects, aborted,
        finished by a late token) or have other places by now."""
        while self._heap:
            order, seq = self._heap[0]
            if seq.status is Status.WAITING and seq.order == order:
                return seq
            heapq.heappop(self._heap)
        return None


class Lanes(Protocol):
    """The part of a policy that says in which lane a request waits, and which lane comes first."""

    def lane(self, seq: Sequence) -> Hashable: ...

    def new_lane(self, name: Hashable) -> Lane: ...

    def place(self, seq: Sequence) -> tuple: ...


class WaitingQueue:
    def __init__(self, policy: Lanes) -> None:
        self._policy = policy
        self.lanes: dict[Hashable, Lane] = {}
        self._tops: list[tuple[tuple, int, Lane]] = []  # the number: a lane that is gone may have left an equal place
        self._noted = 0
        self._refused: tuple[Sequence, int, int, int] | None = None

    def push(self, seq: Sequence) -> None:
        seq.status = Status.WAITING
        name = self._policy.lane(seq)
        lane = self.lanes.get(name)
        if lane is None:
            lane = self.lanes[name] = self._policy.new_lane(name)
        lane.push(seq)
        self._note(lane)

    def _note(self, lane: Lane) -> None:
        first = lane.head()
        place = None if first is None else self._policy.place(first)
        if place is not None and (lane.place is None or place < lane.place):
            lane.place = place
            self._noted += 1
            heapq.heappush(self._tops, (place, self._noted, lane))

    def head(self) -> Sequence | None:
        """The next to be admitted."""
        while self._tops:
            place, number, lane = self._tops[0]
            if lane.place != place:  # the lane has another entry
                heapq.heappop(self._tops)
                continue
            first = lane.head()
            if first is None:
                heapq.heappop(self._tops)
                lane.place = None
                if self.lanes.get(lane.name) is lane:
                    del self.lanes[lane.name]
                continue
            lane.place = self._policy.place(first)
            if lane.place == place:
                return first
            heapq.heapreplace(self._tops, (lane.place, number, lane))
        return None

    def promote(self, seq: Sequence, order: tuple) -> None:
        """Let a request that waits have another place."""
        seq.order = order
        self.push(seq)

    def heads(self) -> Iterator[Sequence]:
        """Yield the first request of each lane, in their order."""
        taken: list[tuple[tuple, int, Lane]] = []
        try:
            while (first := self.head()) is not None:
                taken.append(heapq.heappop(self._tops))
                yield first
        finally:
            for entry in taken:
                heapq.heappush(self._tops, entry)

    def refuse(self, seq: Sequence, free_pages: int, num_running: int, plan_id: int) -> None:
        """Remember that `seq` did not fit, so that its prefix is not searched again at every step."""
        self._refused = seq, free_pages, num_running, plan_id

    def refused(self, seq: Sequence, free_pages: int, num_running: int, since: int) -> bool:
        """Return True if `seq` did not fit in a plan after `since`, and nothing was given back from then on."""
        if self._refused is None or self._refused[0] is not seq:
            return False
        _, pages_then, running_then, plan_then = self._refused
        return plan_then > since and free_pages <= pages_then and 0 < running_then <= num_running
