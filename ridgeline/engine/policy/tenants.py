"""Tenants that have shares of the engine, by the service they got.

Service is counted in predicted milliseconds (`engine/price.py`), divided by the tenant's weight, as each plan is made.
Requests of the tenant with least service come first. Three rules bound the difference between two tenants that both
have requests waiting (Sheng et al., "Fairness in Serving Large Language Models", 2024, count tokens and have the first
rule alone):

* A tenant that begins to wait takes the count of the waiting tenant with least. It can neither save up service nor
  keep more debt than the dearest prompt so far.
* A tenant that is ahead by half of the dearest prompt gives slots to those behind it, as long as these have fewer. One
  that is ahead by half of the dearest prompt and the longest step gives them in any case.
* A tenant that is ahead by the dearest prompt runs no prompts until the others have caught up, and no more decoding
  rows than keep it within one step beyond that.

So the difference is never more than the dearest prompt and one step.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from math import inf
from operator import attrgetter, itemgetter

import numpy as np

from ridgeline.core.plan.request import PEER, Request
from ridgeline.core.plan.step import Rows
from ridgeline.engine.policy.base import Ordered, Terms
from ridgeline.engine.sequence import Sequence

MOST_IDLE = 1024  # tenants without open requests that are remembered
SHOWN = 32  # tenants in figures; the others are shown as one
OTHERS = "other"
NO_KEY = "no key"  # all clients that are known by their addresses
FADES = 0.999  # of the longest step, with each step: the exception is not the rule for ever


class Tenants(Ordered):
    """A policy without its turns. spent: weighted milliseconds, by a tenant's number. dearest, longest: milliseconds
    of the dearest prompt so far, and of the longest step lately.

    Requests that run in the background are those of another tenant, behind all others.
    """

    counts = True

    def __init__(self, terms: Terms | None = None) -> None:
        super().__init__(terms)
        self.spent: list[float] = []
        self.dearest = self.longest = 0.0
        self._numbers: dict[tuple[bool, str], int] = {}
        self._names: list[tuple[bool, str]] = []
        self._free: list[int] = []
        self._weights: list[float] = []
        self._waiting, self._running = Counter[int](), Counter[int]()
        self._least: dict[bool, list[tuple[float, int]]] = {False: [], True: []}  # tenants that wait, by `spent`
        self._newest: dict[int, float] = {}  # milliseconds of the newest plan
        self._prompts: dict[Sequence, None] = {}  # that run and have no token yet
        self._limit = inf  # of `spent` in this plan, beyond which no prompt runs
        self._seen: tuple[list[Sequence], list[int], np.ndarray] = [], [], np.zeros(0, np.int64)
        self._owed: dict[str, float] = {}  # of the same, below 0, for steps that failed
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
        self.spent[number], self._weights[number] = (
            0.0,
            self.settings.tenant_weights.get(name[1].removeprefix(PEER), 1.0),
        )
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
        self._prompts[seq] = None

    def left(self, seq: Sequence) -> None:
        self._prompts.pop(seq, None)
        self._running[seq.tenant] -= 1
        if not self._running[seq.tenant]:
            del self._running[seq.tenant]

    def dropped(self, seq: Sequence) -> None:
        self._waiting[seq.tenant] -= 1

    # ---- service ----------------------------------------------------------------------------------------------

    def serve(self, seqs: list[Sequence], rows: Rows, kv_len_R: np.ndarray) -> None:
        costs = self._costs(seqs, rows, kv_len_R)
        self._newest = costs
        self.longest = max(FADES * self.longest, sum(costs.values()))
        for tenant, cost in costs.items():
            self.spent[tenant] += cost / self._weights[tenant]
            self._show(tenant, cost)

    def failed(self, seqs: list[Sequence], rows: Rows, kv_len_R: np.ndarray) -> None:
        for tenant, cost in self._costs(seqs, rows, kv_len_R).items():
            background = self._names[tenant][0]
            self.spent[tenant] -= cost / self._weights[tenant]
            if self._waiting[tenant]:
                heapq.heappush(self._least[background], (self.spent[tenant], tenant))
            self._show(tenant, -cost)

    def _show(self, tenant: int, cost: float) -> None:
        """Add service to what figures show. Addresses of clients are not shown. These counts never fall: what failed
        is taken from the next service."""
        name = self._names[tenant][1]
        name = NO_KEY if name.startswith(PEER) else name
        shown = name if name in self._served or len(self._served) < SHOWN else OTHERS
        cost += self._owed.pop(shown, 0.0)
        if cost < 0:
            self._owed[shown] = cost
        self._served[shown] = self._served.get(shown, 0.0) + max(0.0, cost)

    def _costs(self, seqs: list[Sequence], rows: Rows, kv_len_R: np.ndarray) -> dict[int, float]:
        """Return the milliseconds of a plan by tenant, in time that does not depend on the number of tenants."""
        if seqs is not self._seen[0]:
            found, places_R = np.unique(np.array([seq.tenant for seq in seqs], np.int64), return_inverse=True)
            self._seen = seqs, found.tolist(), places_R
        _, tenants, places_R = self._seen
        return dict(zip(tenants, np.bincount(places_R, self.price.of_rows(rows, kv_len_R)).tolist(), strict=True))

    def overdrawn(self, running: Callable[[], Collection[Sequence]]) -> list[Sequence]:
        self._limit = inf
        least = self._floor(False)
        if least is None:
            return []
        self._limit = least + self.dearest
        self._prompts = {seq: None for seq in self._prompts if not seq.has_emitted}
        over = {t for t in self._running if self.spent[t] > self._limit and not self._names[t][0]}
        if not over:
            return []
        found = [seq for seq in self._prompts if seq.tenant in over]
        room = {t: (self._limit + self.longest - self.spent[t]) * self._weights[t] for t in over}
        beyond = {t for t in over if self._newest.get(t, inf) > room[t]}  # decoding rows cost what they did, or less
        for seq in sorted(running() if beyond else (), key=attrgetter("order")):
            if seq.tenant in beyond and seq not in self._prompts:
                room[seq.tenant] -= sum(self.price.output(len(member.tokens), 1) for member in seq.members)
                if room[seq.tenant] < 0:
                    found.append(seq)
        return found

    def held(self, seq: Sequence) -> bool:
        return not seq.order[0] and self.spent[seq.tenant] > self._limit

    def lower(self, waiting: Sequence, running: Collection[Sequence]) -> list[Sequence]:
        background, tenant = waiting.order[0], waiting.tenant
        ahead, far = self.spent[tenant] + self.dearest / 2, self.spent[tenant] + (self.dearest + self.longest) / 2
        share = (self._running[tenant] + 1) / self._weights[tenant] if self._running[tenant] else 0.0
        gives = {
            t
            for t, count in self._running.items()
            if self.spent[t] > far or (self.spent[t] > ahead and count / self._weights[t] > share)
        }
        found = [
            (seq.order[0], self.spent[seq.tenant], seq.order[1], seq)
            for seq in running
            if seq.order[0] > background or (seq.order[0] == background and seq.tenant in gives)
        ]
        return [seq for *_, seq in sorted(found, key=itemgetter(0, 1, 2))]

    def claim(self, seq: Sequence) -> tuple:
        return (seq.order[0], self.turn(seq.tenant))

    def figures(self) -> Mapping[str, float]:
        return {f"service: {name}": cost for name, cost in self._served.items()}
