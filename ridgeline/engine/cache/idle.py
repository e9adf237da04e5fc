"""Pages of the cache that no request holds, in the order of their eviction."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

SLACK = 64  # entries of pages that have left, beyond as many as there are pages, before they are cleared away


class Idle(NamedTuple):
    """An idle page. order: counts pages up as they come, so that of equal ranks the oldest goes first."""

    rank: float
    order: int
    page: int


class IdlePages:
    """A heap of pages by rank. An entry whose page has left is skipped when it comes to the top."""

    def __init__(self) -> None:
        self._entries: dict[int, Idle] = {}
        self._heap: list[Idle] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Idle) -> None:
        self._entries[entry.page] = entry
        if len(self._heap) > 2 * len(self._entries) + SLACK:
            self._heap = list(self._entries.values())
            heapify(self._heap)
        else:
            heappush(self._heap, entry)

    def discard(self, page: int) -> None:
        self._entries.pop(page, None)

    def least(self) -> Idle | None:
        """Return the page whose content is worth least."""
        heap = self._heap
        while heap and self._entries.get(heap[0].page) is not heap[0]:
            heappop(heap)
        return heap[0] if heap else None
