"""Smaller `priority` first; within one priority first come, first served, for each owner.

A request that has waited for `priority_aging` seconds rises by one level, and again after as long, up to the highest
that has come. So nothing waits for ever. Requests of the background do not rise.
"""

from __future__ import annotations

import heapq
from operator import attrgetter

from ridgeline.engine.policy.base import MOST_MOVED, still
from ridgeline.engine.policy.ranked import Ranked
from ridgeline.engine.sequence import Sequence


class Priority(Ranked):
    rank = attrgetter("priority")

    def wait(self, seq: Sequence) -> None:
        if self.settings.priority_aging and not seq.request.background:
            heapq.heappush(self.aged, (self.clock() + self.settings.priority_aging, seq.order, seq))

    def due(self) -> list[tuple[Sequence, tuple]]:
        moved: list[tuple[Sequence, tuple]] = []
        now = self.clock() if self.aged else 0.0
        while self.aged and self.aged[0][0] <= now and len(moved) < MOST_MOVED:
            entry = heapq.heappop(self.aged)
            rank, *place = entry[1]
            if still(entry) and rank > self.highest:
                moved.append((entry[2], (rank - 1, *place)))
                again = entry[0] + self.settings.priority_aging
                heapq.heappush(self.aged, (again, (rank - 1, *place), entry[2]))
        return moved
