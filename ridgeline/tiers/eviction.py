"""The order of eviction: the block with the lowest rank goes first. Ranks of a block only grow while it is kept.

lru    the one that was used longest ago
lfu    the one that was used least often, and of these the one used longest ago
cost   the one that spares least time for its bytes, where every eviction raises the floor from which ranks count
       (GreedyDual-Size with frequency: Cao and Irani 1997; Cherkasova 1998)
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, Protocol, TypeVar

from ridgeline.core.errors import InvalidConfig

Rank = tuple[float, int]
POLICIES = ("lru", "lfu", "cost")
SLACK = 64  # entries of blocks that have left, beyond as many as there are blocks, before they are cleared away


class KeptBlock(Protocol):
    """A block that may be given up. cost: milliseconds to compute it again. length: its bytes."""

    rank: Rank
    hits: int
    cost: float
    length: int


_Kept = TypeVar("_Kept", bound=KeptBlock)


class Ranking:
    """The ranks that a policy gives. Raises InvalidConfig for a policy that there is not."""

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise InvalidConfig(f"the eviction policy must be one of {', '.join(POLICIES)}, got {policy!r}.")
        self.policy = policy
        self._uses, self._floor = 0, 0.0

    def use(self, kept: KeptBlock) -> None:
        """Give a block its rank after a use, which counts one of its hits already."""
        self._uses += 1
        if self.policy == "lru":
            value = 0.0
        elif self.policy == "lfu":
            value = float(kept.hits)
        else:
            value = self._floor + (1 + kept.hits) * kept.cost / max(1, kept.length)
        kept.rank = value, self._uses

    def evicted(self, kept: KeptBlock) -> None:
        self._floor = max(self._floor, kept.rank[0]) if self.policy == "cost" else 0.0


class Order(Generic[_Kept]):
    """Blocks in the order of their ranks: a heap, whose entries are put right when they come to the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int, _Kept]] = []
        self._there: set[int] = set()

    def __len__(self) -> int:
        return len(self._there)

    def add(self, kept: _Kept) -> None:
        self._there.add(id(kept))
        heappush(self._heap, (kept.rank, id(kept), kept))

    def discard(self, kept: _Kept) -> None:
        self._there.discard(id(kept))
        if len(self._heap) > 2 * len(self._there) + SLACK:
            self._heap = [entry for entry in self._heap if entry[1] in self._there]
            heapify(self._heap)

    def first(self, allowed: Callable[[_Kept], bool] = lambda kept: True) -> _Kept | None:
        """Return the block of the lowest rank that is allowed, which stays in the order."""
        passed, found = [], None
        while self._heap and found is None:
            rank, number, kept = self._heap[0]
            if number not in self._there:
                heappop(self._heap)
            elif rank != kept.rank:
                heapreplace(self._heap, (kept.rank, number, kept))
            elif allowed(kept):
                found = kept
            else:
                passed.append(heappop(self._heap))
        for entry in passed:
            heappush(self._heap, entry)
        return found
