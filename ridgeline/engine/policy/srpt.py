"""Shortest remaining work first, by a length that is learned (`engine/lengths.py`).

A request waits at most four times as long as it would with first come, first served. There it would wait for the work
of the requests that wait before it. As soon as the engine has done twice that work, the request is served before all
that are not as late, the late ones as they came. Before it among those is at most the same work once more. That is
three times in all, and leaves a quarter of the bound for predictions that are wrong.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

import numpy as np

from ridgeline.core.plan.request import Request
from ridgeline.core.plan.step import Rows
from ridgeline.engine.lengths import Lengths
from ridgeline.engine.policy.base import MOST_MOVED, Ordered, Terms, still
from ridgeline.engine.sequence import Sequence

LATE = 2.0  # of the work before a request with first come, first served


class SRPT(Ordered):
    """Orders: (background, not late, predicted milliseconds that remain, arrival); the late ones have none."""

    counts = True

    def __init__(self, terms: Terms | None = None) -> None:
        super().__init__(terms)
        self.lengths = Lengths()
        self._served = 0.0  # predicted milliseconds of all plans so far
        self._ahead = 0.0  # of the requests that wait
        self._predicted: dict[Sequence, int] = {}  # tokens of outputs
        self._waiting: dict[Sequence, float] = {}

    def lane(self, seq: Sequence) -> bool:
        return bool(seq.order[0])

    def order(self, request: Request, arrival_index: int) -> tuple:
        self.preempts |= request.background
        return (request.background, True, 0.0, arrival_index)

    def come(self, seq: Sequence) -> None:
        self._predicted[seq] = self.lengths.predicted(seq.request)

    def wait(self, seq: Sequence) -> None:
        cost = self.price.prompt(seq.to_read) + self.price.output(len(seq.tokens), self._left(seq))
        background, *_, arrival = seq.order
        seq.order = (background, not seq.preemptions, 0.0 if seq.preemptions else cost, arrival)  # it had its turn
        if not seq.preemptions:
            heapq.heappush(self.aged, (self._served + LATE * self._ahead, seq.order, seq))
        self._waiting[seq] = cost
        self._ahead += cost

    def _left(self, seq: Sequence) -> int:
        """Return the tokens that a request will probably still write."""
        return max(1, self._predicted[seq] - len(seq.output))

    def begin(self, seq: Sequence) -> None:
        self._ahead -= self._waiting.pop(seq)

    def dropped(self, seq: Sequence) -> None:
        self._ahead -= self._waiting.pop(seq)

    def ended(self, seq: Sequence) -> None:
        predicted = self._predicted.pop(seq)
        if seq.output:
            self.lengths.note(seq.request, predicted, len(seq.output))

    def due(self) -> list[tuple[Sequence, tuple]]:
        moved: list[tuple[Sequence, tuple]] = []
        while self.aged and self.aged[0][0] <= self._served and len(moved) < MOST_MOVED:
            entry = heapq.heappop(self.aged)
            if still(entry):
                background, *_, arrival = entry[1]
                moved.append((entry[2], (background, False, 0.0, arrival)))
        return moved

    def serve(self, seqs: list[Sequence], rows: Rows, kv_len_R: np.ndarray) -> None:
        self._served += float(self.price.of_rows(rows, kv_len_R).sum())

    def failed(self, seqs: list[Sequence], rows: Rows, kv_len_R: np.ndarray) -> None:
        self._served -= float(self.price.of_rows(rows, kv_len_R).sum())

    def figures(self) -> Mapping[str, float]:
        return {"lengths: outputs": self.lengths.ended, "lengths: error_tokens": self.lengths.error}
