"""Pages of the cache that no request holds, in the order of their eviction."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import NamedTuple

SLACK = 64  # entries of pages that have left, beyond as many as there are pages, before they are cleared away


class Idle(NamedTuple):
    """An idle page. order: counts pages up as they come, so that of equal ranks the oldest goes first."""

    rank: float
    order: int
    page: int


class IdlePages:
    """Pages by rank: a line of those that came in order, and a heap of the others. An entry whose page has left is
    skipped when it comes first. Where all content is worth the same, all pages come in order."""

    def __init__(self) -> None:
        self._entries: dict[int, Idle] = {}
        self._line: deque[Idle] = deque()
        self._heap: list[Idle] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Idle) -> None:
        line, entries = self._line, self._entries
        entries[entry.page] = entry
        if not line or entry.rank >= line[-1].rank:
            line.append(entry)
        else:
            heappush(self._heap, entry)
        if len(line) + len(self._heap) > 2 * len(entries) + SLACK:
            self._line, self._heap = deque(sorted(entries.values())), []

    def discard(self, page: int) -> None:
        self._entries.pop(page, None)

    def least(self) -> Idle | None:
        """Return the page whose content is worth least."""
        line, heap, entries = self._line, self._heap, self._entries
        while line and entries.get(line[0].page) is not line[0]:
            line.popleft()
        while heap and entries.get(heap[0].page) is not heap[0]:
            heappop(heap)
        if heap and line:
            return min(heap[0], line[0])
        return heap[0] if heap else line[0] if line else None
