"""Tenants that have shares of the engine, by the service they got.

Service is counted in predicted milliseconds (`engine/price.py`), divided by the tenant's weight, as each plan is made.
Requests of the tenant with least service come first. Three rules bound the difference between two tenants that both
have requests waiting (Sheng et al., "Fairness in Serving Large Language Models", 2024, count tokens and have the first
rule alone):

* A tenant that begins to wait takes the count of the waiting tenant with least. It can neither save up service nor
  keep more debt than the dearest prompt so far.
* A tenant that is ahead by half of the dearest prompt gives its slots to those behind it.
* A tenant that is ahead by the dearest prompt gets no service until the others have caught up.

So the difference is never more than the dearest prompt and one step.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from operator import itemgetter

import numpy as np

from ridgeline.core.plan.request import Request
from ridgeline.core.plan.step import Rows
from ridgeline.engine.policy.base import Ordered, Terms
from ridgeline.engine.sequence import Sequence

MOST_IDLE = 1024  # tenants without open requests that are remembered
SHOWN = 32  # tenants in figures; the others are shown as one
OTHERS = "other"


class Tenants(Ordered):
    """A policy without its turns. spent: weighted milliseconds, by a tenant's number. dearest: milliseconds of the
    dearest prompt so far.

    Requests that run in the background are those of another tenant, behind all others.
    """

    counts = True

    def __init__(self, terms: Terms | None = None) -> None:
        super().__init__(terms)
        self.spent: list[float] = []
        self.dearest = 0.0
        self._numbers: dict[tuple[bool, str], int] = {}
        self._names: list[tuple[bool, str]] = []
        self._free: list[int] = []
        self._weights: list[float] = []
        self._waiting, self._running = Counter[int](), Counter[int]()
        self._least: dict[bool, list[tuple[float, int]]] = {False: [], True: []}  # tenants that wait, by `spent`
        self._seen: tuple[list[Sequence], np.ndarray] = [], np.zeros(0, np.int64)
        self._served: dict[str, float] = {}  # milliseconds of the tenants that figures show

    # ---- places -----------------------------------------------------------------------------------------------

    def order(self, request: Request, arrival_index: int) -> tuple:
        return (request.background, arrival_index)

    def lane(self, seq: Sequence) -> tuple[bool, int]:
        return seq.order[0], seq.tenant

    def place(self, seq: Sequence) -> tuple:
        return (seq.order[0], self.turn(seq.tenant), seq.order[1])

    def turn(self, tenant: int) -> float:
        """Return the count by which tenants come, the least first. It never falls while a tenant waits."""
        return self.spent[tenant]

    # ---- tenants ----------------------------------------------------------------------------------------------

    def come(self, seq: Sequence) -> None:
        name = seq.request.background, seq.request.owner
        number = self._numbers.get(name)
        if number is None:
            number = self._new(name)
        self.preempts = len(self._numbers) > 1
        self.dearest = max(self.dearest, self.price.prompt(sum(len(member.tokens) for member in seq.members)))
        for member in seq.members:
            member.tenant = number

    def _new(self, name: tuple[bool, str]) -> int:
        if len(self._numbers) > 2 * (MOST_IDLE + self._waiting.total() + self._running.total()):
            self._forget()
        if not self._free:
            self._free.append(len(self.spent))
            self.spent.append(0.0)
            self._weights.append(1.0)
            self._names.append(name)
        number = self._numbers[name] = self._free.pop()
        self.spent[number], self._weights[number] = 0.0, self.settings.tenant_weights.get(name[1], 1.0)
        self._names[number] = name
        return number

    def _forget(self) -> None:
        """Forget tenants without open requests. One that returns begins as a new one does."""
        self._least = {kind: [(s, t) for s, t in heap if self._waiting[t]] for kind, heap in self._least.items()}
        for heap in self._least.values():
            heapq.heapify(heap)
        for known, number in list(self._numbers.items()):
            if not self._waiting[number] and not self._running[number]:
                del self._numbers[known], self._waiting[number], self._running[number]
                self._free.append(number)

    def wait(self, seq: Sequence) -> None:
        tenant = seq.tenant
        if not self._waiting[tenant]:
            self._join(tenant, seq.order[0])
        self._waiting[tenant] += 1

    def _join(self, tenant: int, background: bool) -> None:
        """Let a tenant wait that did not before."""
        least = self._floor(background)
        if least is None:  # nobody was short of service: all begin alike
            kind = (number for number in self._running if self._names[number][0] == background)
            least = max((self.spent[number] for number in kind), default=self.spent[tenant])
        self.spent[tenant] = min(max(self.spent[tenant], least), least + self.dearest)
        heapq.heappush(self._least[background], (self.spent[tenant], tenant))
        if len(self._least[background]) > 64 + 4 * len(self._numbers):
            self._least[background] = sorted({t: (self.spent[t], t) for _, t in self._least[background]}.values())

    def _floor(self, background: bool) -> float | None:
        """Return the least count of the tenants that wait, or None if none does."""
        heap = self._least[background]
        while heap:
            spent, tenant = heap[0]
            if not self._waiting[tenant]:
                heapq.heappop(heap)
            elif self.spent[tenant] != spent:
                heapq.heapreplace(heap, (self.spent[tenant], tenant))
            else:
                return spent
        return None

    def begin(self, seq: Sequence) -> None:
        self._waiting[seq.tenant] -= 1
        self._running[seq.tenant] += 1

    def left(self, seq: Sequence) -> None:
        self._running[seq.tenant] -= 1
        if not self._running[seq.tenant]:
            del self._running[seq.tenant]

    def dropped(self, seq: Sequence) -> None:
        self._waiting[seq.tenant] -= 1

    # ---- service ----------------------------------------------------------------------------------------------

    def serve(self, seqs: list[Sequence], rows: Rows, kv_len_R: np.ndarray) -> None:
        if seqs is not self._seen[0]:
            self._seen = seqs, np.array([seq.tenant for seq in seqs], np.int64)
        sums = np.bincount(self._seen[1], self.price.of_rows(rows, kv_len_R))
        for tenant in sums.nonzero()[0].tolist():
            cost = float(sums[tenant])
            self.spent[tenant] += cost / self._weights[tenant]
            name = self._names[tenant][1]
            shown = name if name in self._served or len(self._served) < SHOWN else OTHERS
            self._served[shown] = self._served.get(shown, 0.0) + cost

    def overdrawn(self, running: Callable[[], Collection[Sequence]]) -> list[Sequence]:
        least = self._floor(False)
        if least is None:
            return []
        limit = least + self.dearest
        over = {t for t, count in self._running.items() if count and self.spent[t] > limit and not self._names[t][0]}
        return [seq for seq in running() if seq.tenant in over] if over else []

    def lower(self, waiting: Sequence, running: Collection[Sequence]) -> list[Sequence]:
        mine, background = self.spent[waiting.tenant] + self.dearest / 2, waiting.order[0]
        found = [
            (seq.order[0], self.spent[seq.tenant], seq.order[1], seq)
            for seq in running
            if seq.order[0] > background or (seq.order[0] == background and self.spent[seq.tenant] > mine)
        ]
        return [seq for *_, seq in sorted(found, key=itemgetter(0, 1, 2))]

    def claim(self, seq: Sequence) -> tuple:
        return (seq.order[0], self.turn(seq.tenant))

    def figures(self) -> Mapping[str, float]:
        return {f"service: {name}": cost for name, cost in self._served.items()}
