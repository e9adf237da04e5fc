"""Requests that wait for a slot, in policy order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from ridgeline.engine.sequence import Sequence, Status


class WaitingQueue:
    """heap: an entry is skipped if its request waits no more (admitted as a suspect, aborted, finished by a late token)
    or has another place by now."""

    def __init__(self) -> None:
        self.heap: list[tuple[tuple, Sequence]] = []
        self._refused: tuple[Sequence, int, int, int] | None = None

    def push(self, seq: Sequence) -> None:
        seq.status = Status.WAITING
        heapq.heappush(self.heap, (seq.order, seq))

    def head(self) -> Sequence | None:
        """The next to be admitted."""
        while self.heap:
            order, seq = self.heap[0]
            if seq.status is Status.WAITING and seq.order == order:
                return seq
            heapq.heappop(self.heap)
        return None

    def promote(self, seq: Sequence, order: tuple) -> None:
        """Let a request that waits have another place."""
        seq.order = order
        heapq.heappush(self.heap, (order, seq))

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the requests that wait, in any order."""
        return (seq for order, seq in self.heap if seq.status is Status.WAITING and seq.order == order)

    def refuse(self, seq: Sequence, free_pages: int, num_running: int, plan_id: int) -> None:
        """Remember that `seq` did not fit, so that its prefix is not searched again at every step."""
        self._refused = seq, free_pages, num_running, plan_id

    def refused(self, seq: Sequence, free_pages: int, num_running: int, since: int) -> bool:
        """Return True if `seq` did not fit in a plan after `since`, and nothing was given back from then on."""
        if self._refused is None or self._refused[0] is not seq:
            return False
        _, pages_then, running_then, plan_then = self._refused
        return plan_then > since and free_pages <= pages_then and 0 < running_then <= num_running
