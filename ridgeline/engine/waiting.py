"""Requests that wait for a slot, in policy order.

They wait in lanes, one for each tenant or rank, as the policy says. The lanes lie in a heap by the place of their first
request. Places of a lane may move backwards while nothing touches it, as its tenant is served, so an entry is looked at
again when it comes to the top. A step takes the same time with ten requests and with a hundred thousand.

A request that cannot start for a reason of its own (its adapter has no place, or enough long prompts are under way)
does not hold back those behind it: within one plan it steps aside (`pass_by`). At most ASIDE requests do, and each
lets at most OVERTAKES others start first. From then on it holds back all behind it, so it starts as soon as it would
have without those.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterator
from typing import Protocol

from ridgeline.engine.sequence import Sequence, Status

ASIDE = 32  # requests that step aside in one plan
OVERTAKES = 64  # requests that start before one that came earlier


class Lane:
    """Requests in their own order: a line of those that came in it, and a heap of the others. place: of its first one,
    when it was last looked at."""

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.place: tuple | None = None
        self._line: deque[tuple[tuple, Sequence]] = deque()
        self._heap: list[tuple[tuple, Sequence]] = []
        self.aside: list[Sequence] = []  # that were first, and let others pass

    def push(self, seq: Sequence) -> None:
        if not self._line or seq.order > self._line[-1][0]:
            self._line.append((seq.order, seq))
        else:
            heapq.heappush(self._heap, (seq.order, seq))

    def head(self) -> Sequence | None:
        """Return the first request. Entries are skipped if their requests wait no more (admitted as suspects, aborted,
        finished by a late token) or have other places by now."""
        line, heap = self._line, self._heap
        while line or heap:
            first = heap if heap and (not line or heap[0][0] < line[0][0]) else line
            order, seq = first[0]
            if seq.status is Status.WAITING and seq.order == order:
                return seq
            if first is line:
                line.popleft()
            else:
                heapq.heappop(heap)
            if seq.status is Status.ASIDE and seq.order == order:
                self.aside.append(seq)
        return None

    def back(self) -> None:
        """Take in those again that were aside, and wait by now."""
        for seq in self.aside:
            Lane.push(self, seq)
        self.aside = []


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
        self.aside: list[Sequence] = []
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

    def sort(self) -> None:
        """Look at the places of all lanes anew: `head` alone finds those that rose."""
        self._tops.clear()
        for name, lane in list(self.lanes.items()):
            lane.place = None
            self._note(lane)
            if lane.place is None and not lane.aside:
                del self.lanes[name]

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
                if self.lanes.get(lane.name) is lane and not lane.aside:
                    del self.lanes[lane.name]
                continue
            lane.place = self._policy.place(first)
            if lane.place == place:
                return first
            heapq.heapreplace(self._tops, (lane.place, number, lane))
        return None

    def pass_by(self, seq: Sequence) -> bool:
        """Let those behind the first request come first, until `back`. False if enough have overtaken it."""
        if len(self.aside) >= ASIDE or seq.overtaken >= OVERTAKES:
            return False
        seq.status = Status.ASIDE
        self.aside.append(seq)
        return True

    def overtake(self) -> None:
        """A request has started that those aside let pass."""
        for seq in self.aside:
            seq.overtaken += 1

    @property
    def lets_more_pass(self) -> bool:
        """Return True if none of those aside was overtaken often enough."""
        return all(seq.overtaken < OVERTAKES for seq in self.aside)

    def back(self) -> None:
        """Let the requests aside come first again."""
        aside, self.aside = self.aside, []
        for seq in aside:
            seq.status = Status.WAITING
        for name in {self._policy.lane(seq): None for seq in aside}:
            self.lanes[name].back()
            self._note(self.lanes[name])

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
