"""Longest prefix match within a tenant's deficit (Cao et al., "Locality-aware Fair Scheduling in LLM Serving", 2025).

Tenants take turns as in `drr.py`. Within its turn a tenant's request comes first whose beginning was run lately, the
longest such beginning first, since the cache has it. Beginnings are compared at a few lengths, by their hashes, so no
request is looked at twice. Every eighth request is the oldest one, so that none waits for ever.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable

from ridgeline.engine.policy.base import Terms
from ridgeline.engine.policy.drr import DRR
from ridgeline.engine.sequence import Sequence, Status
from ridgeline.engine.waiting import Lane

LENGTHS = (8192, 2048, 512, 128, 32)  # tokens at which beginnings are compared
RECENT = 64  # beginnings that count as cached
OLDEST = 8  # of so many requests one is the oldest


class DLPM(DRR):
    """recent: hash → length of the beginnings that ran last, the newest last."""

    def __init__(self, terms: Terms | None = None) -> None:
        super().__init__(terms)
        self.recent: OrderedDict[int, int] = OrderedDict()

    def new_lane(self, name: Hashable) -> Lane:
        return PrefixLane(name, self.recent)

    def begin(self, seq: Sequence) -> None:
        super().begin(seq)
        for length, key in beginnings(seq):
            self.recent[key] = length
            self.recent.move_to_end(key)
        while len(self.recent) > RECENT:
            self.recent.popitem(last=False)


class PrefixLane(Lane):
    """A tenant's requests, by their beginnings as well."""

    def __init__(self, name: Hashable, recent: OrderedDict[int, int]) -> None:
        super().__init__(name)
        self._recent, self._count = recent, 0
        self._chosen: Sequence | None = None
        self._by_beginning: dict[int, deque[Sequence]] = {}

    def push(self, seq: Sequence) -> None:
        super().push(seq)
        for _, key in beginnings(seq):
            self._by_beginning.setdefault(key, deque()).append(seq)

    def head(self) -> Sequence | None:
        if self._chosen is not None and self._chosen.status is Status.WAITING:
            return self._chosen
        oldest = super().head()
        self._chosen = oldest
        self._count += 1
        if oldest is not None and self._count % OLDEST:
            self._chosen = self._cached() or oldest
        return self._chosen

    def _cached(self) -> Sequence | None:
        """Return the oldest request with the longest beginning that ran lately."""
        found = [(self._recent[key], key) for key in self._recent.keys() & self._by_beginning.keys()]
        found.sort(reverse=True)
        for _, key in found:
            waiting = self._by_beginning[key]
            while waiting and waiting[0].status not in (Status.WAITING, Status.ASIDE):
                waiting.popleft()
            if not waiting:
                del self._by_beginning[key]
            elif waiting[0].status is Status.WAITING:
                return waiting[0]
        return None


def beginnings(seq: Sequence) -> list[tuple[int, int]]:
    """Return the lengths at which a request's beginning is compared, the longest first, each with its hash."""
    prompt, salt = seq.request.prompt_token_ids, seq.request.cache_salt
    return [(n, hash((salt, prompt[:n]))) for n in LENGTHS if n <= len(prompt)]
