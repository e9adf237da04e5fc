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

Legend:
    P  places of tenants that run
    R  rows of a plan
    S  slots
    T  tenants, by their numbers
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
from ridgeline.engine.policy.base import Cost, Ordered, Terms
from ridgeline.engine.sequence import Sequence

MOST_IDLE = 1024  # tenants without open requests that are remembered
SHOWN = 32  # tenants in figures; the others are shown as one
OTHERS = "other"
NOBODY = (True, "")  # the tenant of places that are free
NO_KEY = "no key"  # all clients that are known by their addresses
FADES = 0.999  # of the longest step, with each step: the exception is not the rule for ever


class Tenants(Ordered):
    """A policy without its turns. spent_T: weighted milliseconds, by a tenant's number. dearest, longest: milliseconds
    of the dearest prompt so far, and of the longest step lately.

    Requests that run in the background are those of another tenant, behind all others. Tenants that run have places,
    as many as there are slots at most, so a plan is added up in a few vector operations, however many tenants wait.
    """

    counts = True

    def __init__(self, terms: Terms | None = None) -> None:
        super().__init__(terms)
        self.dearest = self.longest = 0.0
        self._numbers: dict[tuple[bool, str], int] = {}
        self._names: list[tuple[bool, str]] = [NOBODY]
        self._free: list[int] = []
        self.spent_T, self._weight_T = np.zeros(64), np.ones(64)
        self._waiting = Counter[int]()
        self._running: dict[int, dict[Sequence, None]] = {}
        # Tenants that wait and do not run, by `spent`. Those that run too are compared by their places
        self._least: dict[bool, list[tuple[float, int]]] = {False: [], True: []}
        self._prompts: dict[Sequence, None] = {}  # that run and have no token yet
        self._limit = inf  # of `spent` in this plan, beyond which no prompt runs
        self._places: dict[int, int] = {}  # of tenants that run
        self._free_places: list[int] = []
        self._tenant_P: np.ndarray = np.zeros(0, np.intp)  # 0 where no tenant has the place
        self._foreground_P: np.ndarray = np.zeros(0, np.bool_)
        self._waits_P: np.ndarray = np.zeros(0, np.bool_)
        self._newest_P: np.ndarray = np.zeros(0)  # milliseconds of the newest plan
        self._shown_P = np.zeros(0)  # of all plans since `_show`
        self._place_S = np.zeros(0, np.intp)
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
        """Return the count by which tenants come, the least first. While a tenant waits it falls only where `fell` is
        set."""
        return self.spent_T.item(tenant)

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
        if len(self._numbers) > 2 * (MOST_IDLE + self._waiting.total() + len(self._running)):
            self._forget()
        if not self._free:
            self._free.append(len(self._names))
            self._names.append(name)
            if len(self._names) > len(self.spent_T):
                self.spent_T = np.append(self.spent_T, np.zeros_like(self.spent_T))
                self._weight_T = np.append(self._weight_T, np.ones_like(self._weight_T))
        number = self._numbers[name] = self._free.pop()
        self.spent_T[number] = 0.0
        self._weight_T[number] = self.settings.tenant_weights.get(name[1].removeprefix(PEER), 1.0)
        self._names[number] = name
        return number

    def _forget(self) -> None:
        """Forget tenants without open requests. One that returns begins as a new one does."""
        self._least = {kind: [(s, t) for s, t in heap if self._waiting[t]] for kind, heap in self._least.items()}
        for heap in self._least.values():
            heapq.heapify(heap)
        for known, number in list(self._numbers.items()):
            if not self._waiting[number] and number not in self._running:
                del self._numbers[known], self._waiting[number]
                self._free.append(number)

    def wait(self, seq: Sequence) -> None:
        tenant = seq.tenant
        if not self._waiting[tenant]:
            self._join(tenant, seq.order[0])
        self._waiting[tenant] += 1
        if (place := self._places.get(tenant)) is not None:
            self._waits_P[place] = True

    def _join(self, tenant: int, background: bool) -> None:
        """Let a tenant wait that did not before."""
        least = self._floor(background)
        if least is None:  # nobody was short of service: all begin alike
            kind = (number for number in self._running if self._names[number][0] == background)
            least = max(map(self.spent_T.item, kind), default=self.spent_T.item(tenant))
        spent = self.spent_T[tenant] = min(max(self.spent_T.item(tenant), least), least + self.dearest)
        if tenant in self._places:
            return
        heapq.heappush(self._least[background], (spent, tenant))
        if len(self._least[background]) > 64 + 4 * len(self._numbers):
            newest = {t: (self.spent_T.item(t), t) for _, t in self._least[background]}
            self._least[background] = sorted(newest.values())

    def _note_least(self, tenant: int) -> None:
        """Note the count of a tenant that waits and does not run."""
        heapq.heappush(self._least[self._names[tenant][0]], (self.spent_T.item(tenant), tenant))

    def _floor(self, background: bool) -> float | None:
        """Return the least count of the tenants that wait, or None if none does."""
        asking_P = self._waits_P & (self._foreground_P != background)
        least = float(np.minimum.reduce(self.spent_T[self._tenant_P], where=asking_P, initial=inf))
        heap = self._least[background]
        while heap:
            spent, tenant = heap[0]
            if not self._waiting[tenant] or tenant in self._places:
                heapq.heappop(heap)
            elif (now := self.spent_T.item(tenant)) != spent:
                heapq.heapreplace(heap, (now, tenant))
            else:
                least = min(least, spent)
                break
        return None if least == inf else least

    def begin(self, seq: Sequence) -> None:
        tenant = seq.tenant
        place = self._places.get(tenant)
        if place is None:
            place = self._take_place(tenant)
        self.dropped(seq)
        self._running[tenant][seq] = self._prompts[seq] = None
        for member in seq.members:
            if member.slot >= len(self._place_S):
                self._place_S = np.append(self._place_S, np.zeros(1 + member.slot, np.intp))
            self._place_S[member.slot] = place

    def _take_place(self, tenant: int) -> int:
        """Return the place of a tenant that did not run."""
        if not self._free_places:
            size = len(self._tenant_P)
            self._free_places = [*range(size, 2 * size + 1)]
            for name in ("_tenant_P", "_foreground_P", "_waits_P", "_newest_P", "_shown_P"):
                old = getattr(self, name)
                setattr(self, name, np.append(old, np.zeros(size + 1, old.dtype)))
        place = self._places[tenant] = self._free_places.pop()
        self._running[tenant] = {}
        self._tenant_P[place], self._newest_P[place] = tenant, inf
        self._foreground_P[place] = not self._names[tenant][0]
        return place

    def left(self, seq: Sequence) -> None:
        self._prompts.pop(seq, None)
        running = self._running[seq.tenant]
        del running[seq]
        if not running:
            place = self._places.pop(seq.tenant)
            self._show(seq.tenant, self._shown_P.item(place))
            self._tenant_P[place] = self._shown_P[place] = self._foreground_P[place] = self._waits_P[place] = 0
            self._free_places.append(place)
            del self._running[seq.tenant]
            if self._waiting[seq.tenant]:
                self._note_least(seq.tenant)

    def dropped(self, seq: Sequence) -> None:
        self._waiting[seq.tenant] -= 1
        if (place := self._places.get(seq.tenant)) is not None:
            self._waits_P[place] = self._waiting[seq.tenant] > 0

    # ---- service ----------------------------------------------------------------------------------------------

    def serve(self, seqs: list[Sequence], rows: Rows, kv_len_R: np.ndarray) -> None:
        cost_R = self.price.of_rows(rows, kv_len_R)
        cost_P = np.bincount(self._place_S[rows.slots_R], cost_R, len(self._tenant_P))
        self._newest_P = cost_P
        self._shown_P += cost_P
        self.spent_T[self._tenant_P] += cost_P / self._weight_T[self._tenant_P]
        self.longest = max(FADES * self.longest, float(cost_R.sum()))

    def failed(self, seqs: list[Sequence], rows: Rows, kv_len_R: np.ndarray) -> None:
        costs = Counter[int]()
        for seq, cost in zip(seqs, self.price.of_rows(rows, kv_len_R).tolist(), strict=True):
            costs[seq.tenant] += cost
        self.fell = True
        for tenant, cost in costs.items():
            self.spent_T[tenant] -= cost / self._weight_T[tenant]
            if self._waiting[tenant] and tenant not in self._places:
                self._note_least(tenant)
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

    def overdrawn(self, running: Callable[[], Collection[Sequence]]) -> list[Sequence]:
        self._limit = inf
        least = self._floor(False)
        if least is None:
            return []
        self._limit = least + self.dearest
        self._prompts = {seq: None for seq in self._prompts if not seq.has_emitted}
        spent_P = self.spent_T[self._tenant_P]
        over_P = self._foreground_P & (spent_P > self._limit)
        if not over_P.any():
            return []
        over = set(self._tenant_P[over_P].tolist())
        found = [seq for seq in self._prompts if seq.tenant in over]
        room_P = (self._limit + self.longest - spent_P) * self._weight_T[self._tenant_P]
        beyond_P = over_P & (self._newest_P > room_P)  # decoding rows cost what they did, or less
        beyond = self._tenant_P[beyond_P].tolist()
        room = dict(zip(beyond, room_P[beyond_P].tolist(), strict=True))
        for seq in sorted(running() if beyond else (), key=attrgetter("order")):
            if seq.tenant in room and seq not in self._prompts:
                room[seq.tenant] -= sum(self.price.output(len(member.tokens), 1) for member in seq.members)
                if room[seq.tenant] < 0:
                    found.append(seq)
        return found

    def held(self, seq: Sequence) -> bool:
        return not seq.order[0] and self.spent_T.item(seq.tenant) > self._limit

    def lower(
        self, waiting: Sequence, running: Callable[[], Collection[Sequence]], cost: Cost = lambda seq: 0.0
    ) -> list[Sequence]:
        background, tenant = waiting.order[0], waiting.tenant
        spent = self.spent_T.item(tenant)
        ahead, far = spent + self.dearest / 2, spent + (self.dearest + self.longest) / 2
        own = self._running.get(tenant, ())
        share = (len(own) + 1) / self._weight_T.item(tenant) if own else 0.0
        before_P = self.spent_T[self._tenant_P] > ahead
        asked_P = before_P & ~self._foreground_P if background else before_P | ~self._foreground_P
        found = list[tuple[bool, float, float, int, Sequence]]()
        for t in self._tenant_P[asked_P].tolist():
            theirs, behind, has = self.spent_T.item(t), self._names[t][0], self._running.get(t, {})
            gives = theirs > far or (theirs > ahead and len(has) / self._weight_T.item(t) > share)
            if gives or behind > background:
                found += [(behind, theirs, -cost(seq), seq.order[1], seq) for seq in has]
        there = running() if found else ()
        return [seq for *_, seq in sorted(found, key=itemgetter(0, 1, 2, 3)) if seq in there]

    def claim(self, seq: Sequence) -> tuple:
        return (seq.order[0], self.turn(seq.tenant))

    def figures(self) -> Mapping[str, float]:
        for tenant, place in self._places.items():
            self._show(tenant, self._shown_P.item(place))
        self._shown_P[:] = 0
        return {f"service: {name}": cost for name, cost in self._served.items()}
