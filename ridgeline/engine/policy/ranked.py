"""Ranks first, and within a rank owners that take turns.

A request's place is the work that its owner had asked for before it, counted from the place of the newest request that
has started (start-time fair queueing: Goyal, Vin and Cheng, "Start-time fair queuing", 1996). So an owner with many
requests does not delay the first ones of another, and the requests of one owner start in the order in which they came.

An owner's share is an equal part of the running requests, among all owners that run or wait. If a request cannot start,
one of an owner below three quarters of its share comes first, and takes the place of one whose owner is above its
share. A gap of a place or two closes by itself when the next requests end, and each preempted request starts over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable
from math import inf
from operator import attrgetter
from typing import ClassVar

from ridgeline.core.plan.request import Request
from ridgeline.engine.policy.base import Cost, Ordered, Terms
from ridgeline.engine.sequence import Sequence

EXPECTED = 256  # tokens of the output that count as work beforehand: few requests write all that they may
MOST_OWNERS = 1024  # beyond which those that have nothing ahead are forgotten


class Ranked(Ordered):
    """A policy without its ranks: `rank` gives a request's, smaller ones first. `preempts` says whether requests of
    several ranks or owners have come. highest: rank that has come."""

    rank: ClassVar[attrgetter[int]]

    def __init__(self, terms: Terms | None = None) -> None:
        super().__init__(terms)
        self._first: tuple[int, str] | None = None
        self.highest = inf
        self._now = 0
        self._most = MOST_OWNERS
        self._next: dict[tuple[int, str], int] = {}  # by rank and owner the place of a request that comes
        self._running: dict[int, Counter[str]] = {}  # by rank, the requests in slots of each owner

    def order(self, request: Request, arrival_index: int) -> tuple:
        kind = self.rank(request), request.owner
        self._first = self._first or kind
        self.preempts |= kind != self._first
        self.highest = min(self.highest, kind[0])
        place = max(self._now, self._next.get(kind, 0))
        output = min(request.max_total_tokens - len(request.prompt_token_ids), EXPECTED)
        self._next[kind] = place + request.read_tokens + output
        if len(self._next) > self._most:
            self._next = {kind: after for kind, after in self._next.items() if after > self._now}
            self._most = max(MOST_OWNERS, 2 * len(self._next))  # so that this is not done for each one that comes
        return (kind[0], True, place, arrival_index)

    def lane(self, seq: Sequence) -> tuple[int, str]:
        return seq.order[0], seq.request.owner

    def begin(self, seq: Sequence) -> None:
        self._now = max(self._now, seq.order[2])
        self._running.setdefault(seq.order[0], Counter())[seq.request.owner] += 1

    def left(self, seq: Sequence) -> None:
        rank, owner = seq.order[0], seq.request.owner
        counts = self._running[rank]
        counts[owner] -= 1
        if not counts[owner]:
            del counts[owner]
        if not counts:
            del self._running[rank]

    def promote(self, seq: Sequence) -> tuple:
        rank, _, *place = seq.order
        return (rank, False, *place)

    def entitled(self, waiting: Iterable[Sequence], lanes: Collection[Hashable]) -> Sequence | None:
        asking = list[Sequence]()
        counts = Counter[str]()
        for seq in waiting:
            if not asking:
                counts = self._running.get(seq.order[0], counts)
                if max(counts.values(), default=0) < 2:
                    return None  # no share is smaller than one
                if len(lanes) <= counts.total() and not self._is_short(counts, seq.order[0], lanes):
                    return None
            elif seq.order[0] != asking[0].order[0]:
                break
            asking.append(seq)
            if len(asking) > counts.total() + len(counts):
                break  # a share is one, and some of these run nothing
        share = _share(counts, {seq.request.owner for seq in asking})
        if not any(count > share for count in counts.values()):
            return None
        return next((seq for seq in asking if counts[seq.request.owner] < _few(share)), None)

    def _is_short(self, counts: Counter[str], rank: int, lanes: Collection[Hashable]) -> bool:
        """Return False if no owner that waits in a lane of this rank can run less than its share. The share is largest
        if none of those that run nothing asks for one."""
        most = _share(counts, ())
        return any(counts.get(lane[1], 0) < _few(most) for lane in lanes if isinstance(lane, tuple) and lane[0] == rank)

    def lower(
        self, waiting: Sequence, running: Callable[[], Collection[Sequence]], cost: Cost = lambda seq: 0.0
    ) -> list[Sequence]:
        rank, owner = waiting.order[0], waiting.request.owner
        counts = self._running.get(rank, Counter[str]())
        share = _share(counts, {owner})
        more = {each for each, count in counts.items() if count > share} if counts[owner] < _few(share) else set()
        if not more and max(self._running, default=rank) <= rank:
            return []
        found = [
            seq for seq in running() if seq.order[0] > rank or (seq.order[0] == rank and seq.request.owner in more)
        ]
        return sorted(found, key=lambda seq: (seq.order[0], -cost(seq), seq.order))

    def outranked(self, seq: Sequence) -> bool:
        return bool(seq.order[0] > self.highest)

    def keeping(self, running: Collection[Sequence], cost: Cost = lambda seq: 0.0) -> list[Sequence]:
        first = min(running, key=lambda seq: seq.order)  # it always goes on, so that every request ends
        counts = Counter((seq.order[0], seq.request.owner) for seq in running)
        totals = Counter(seq.order[0] for seq in running)
        owners = Counter(rank for rank, _ in counts)

        def place(seq: Sequence) -> tuple:
            rank = seq.order[0]
            more = counts[rank, seq.request.owner] > totals[rank] // owners[rank]
            return seq is not first, rank, more, -cost(seq), seq.order

        return sorted(running, key=place)


def _share(counts: Counter[str], others: Iterable[str]) -> int:
    """Return the number of running requests that each owner may have, if all of them and these others have equally
    many."""
    return max(1, counts.total() // max(1, len(counts.keys() | set(others))))


def _few(share: int) -> int:
    """Return the number of running requests below which an owner takes the places of others."""
    return share - share // 4
