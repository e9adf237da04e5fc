"""Objectives: a first token in time, and no longer than so much between tokens; least slack first.

A request's slack is the time until it must start for its first token to come in time. Those whose time is over come
last, in the order in which they came. A request whose objective cannot be met is refused at once, with the time that
could be promised. The prediction is the prompts that are to run before its first token, in as many steps as they fill,
with the decoding rows of the newest step beside them, behind the plans in flight. What a step takes, and each predicted
millisecond of it, is learned from the steps that ran, so decoding rows count at what they took. A step is timed from
the result of the one before it to its own: plans are made while others run. Requests wait for slots as well, so it is
no less than what those before it took while requests waited.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Mapping
from math import ceil

import numpy as np

from ridgeline.core.errors import CannotPromise
from ridgeline.core.plan.request import Request
from ridgeline.core.plan.step import RowKind, Rows
from ridgeline.engine.policy.base import MOST_MOVED, Ordered, Terms, still
from ridgeline.engine.sequence import Sequence

SPAN = 0.05  # seconds of deadlines that are summed up as one
MEMORY = 0.05  # weight of the newest start in the pace, in the long run
FIRST_PACE = 1.3e-3  # seconds for each predicted millisecond, before any was measured
LEARNS = 0.05  # weight of the newest step in the seconds of steps, in the long run
MARGIN = 0.9  # of an objective, within which the prediction must be


class SLO(Ordered):
    """Orders: (background, over, the latest start, arrival), in seconds on the engine's clock.

    itl: the least objective between tokens of the requests that run, in seconds; None without any.
    """

    counts = True

    def __init__(self, terms: Terms | None = None) -> None:
        super().__init__(terms)
        self.refused = self.missed = 0
        self._ahead: Counter[int] = Counter()  # microseconds of prompts that wait, by the span of their latest start
        self._under_way: dict[Sequence, float] = {}  # milliseconds of prompts that run, which are in no plan yet
        self._seconds, self._started = FIRST_PACE, 1.0  # of starts while requests waited, and their milliseconds
        self._since: float | None = None  # the newest start, or when requests began to wait
        self._flying: deque[float] = deque()  # milliseconds of the plans in flight
        self._begun = 0.0  # when the oldest of these began to run
        self._decodes = 0.0  # milliseconds of the newest plan's rows that decode
        self._starts = 0
        self._steps = StepTimes()
        self._largest = 1e-9  # milliseconds of prompts in one step, lately
        self._open = 0
        self._budgets = Counter[float]()

    def check(self, request: Request) -> None:
        if request.background:
            return
        ttft, own, now = self._ttft(request), self.price.prompt(request.read_tokens), self.clock()
        deadline = request.arrival + ttft
        latest = self._span(deadline - own * self._steps.each)
        ahead = 1e-3 * sum(cost for span, cost in self._ahead.items() if span <= latest)
        started = sum(self._under_way.values()) + own
        seconds = max(self._until(ahead + started), ahead * self._seconds / self._started + self._until(started))
        left = MARGIN * (deadline - now)
        if seconds > left and (self._open or own * FIRST_PACE > ttft):  # else it shows how fast the engine is
            self.refused += 1
            could = ceil(1e3 * (now - request.arrival + seconds / MARGIN))
            raise CannotPromise(
                f"a first token within {1e3 * ttft:g} ms cannot be promised now; one within {could} ms could. Ask for "
                "that with slo_ttft_ms, or try again later.",
                param="slo_ttft_ms",
                retry_after=max(1, ceil(seconds - left)),
            )
        itl, token = self._itl(request), self._steps.base + self._steps.each * self.price.row
        if itl and token > itl:
            self.refused += 1
            raise CannotPromise(
                f"{1e3 * itl:g} ms between tokens cannot be promised; a step takes {1e3 * token:.3g} ms. Ask for more "
                "with slo_itl_ms.",
                param="slo_itl_ms",
                retry_after=1,
            )

    def _until(self, prompts: float) -> float:
        """Return the seconds in which so many milliseconds of prompts run, behind the plans in flight."""
        steps = max(1, ceil(prompts / self._largest)) if self._open else 1
        flying = [self._steps.seconds(cost) for cost in self._flying]
        if flying:
            flying[0] = max(0.0, flying[0] - (self.clock() - self._begun))
        return sum(flying) + steps * self._steps.seconds(self._decodes) + prompts * self._steps.each

    def _ttft(self, request: Request) -> float:
        return request.slo_ttft or self.settings.slo_ttft

    def _itl(self, request: Request) -> float:
        return request.slo_itl or self.settings.slo_itl

    def _span(self, latest: float) -> int:
        return int(latest // SPAN)

    def order(self, request: Request, arrival_index: int) -> tuple:
        self.preempts |= request.background
        own = self.price.prompt(request.read_tokens) * self._steps.each
        return (request.background, False, request.arrival + self._ttft(request) - own, arrival_index)

    def wait(self, seq: Sequence) -> None:
        self._open += 1
        background, over, latest, arrival = seq.order
        if seq.first_token is not None:  # its reader waits for the next one
            seq.order = (background, False, 0.0, arrival)
            return
        if not self._ahead:
            self._since = self.clock()
        if not over:
            self._ahead[self._span(latest)] += self._own(seq)
            heapq.heappush(self.aged, (latest, seq.order, seq))

    def _own(self, seq: Sequence) -> int:
        """Return predicted microseconds as a whole number, so that sums come back to 0."""
        return ceil(1e3 * self.price.prompt(seq.request.read_tokens))

    def _waits_no_more(self, seq: Sequence) -> int:
        """Take a request out of the sums. Return its microseconds there."""
        _, over, latest, _ = seq.order
        if over or latest == 0.0:
            return 0
        own, span = self._own(seq), self._span(latest)
        self._ahead[span] -= own
        if self._ahead[span] <= 0:
            del self._ahead[span]
        return own

    def begin(self, seq: Sequence) -> None:
        now, own = self.clock(), self._waits_no_more(seq)
        if own and self._since is not None:
            self._starts += 1
            weight = max(MEMORY, 1 / self._starts)
            self._seconds += weight * (now - self._since - self._seconds)
            self._started += weight * (1e-3 * own - self._started)
        self._since = now if self._ahead else None
        if seq.first_token is None:
            self._under_way[seq] = self.price.prompt(seq.to_read)
        if itl := self._itl(seq.request):
            self._budgets[itl] += 1
            self.itl = min(self._budgets)

    def left(self, seq: Sequence) -> None:
        self._open -= 1
        self._under_way.pop(seq, None)
        if itl := self._itl(seq.request):
            self._budgets[itl] -= 1
            if not self._budgets[itl]:
                del self._budgets[itl]
                self.itl = min(self._budgets, default=None)

    def dropped(self, seq: Sequence) -> None:
        self._open -= 1
        self._waits_no_more(seq)
        self._since = self._since if self._ahead else None

    def due(self) -> list[tuple[Sequence, tuple]]:
        moved: list[tuple[Sequence, tuple]] = []
        now = self.clock() if self.aged else 0.0
        while self.aged and self.aged[0][0] < now and len(moved) < MOST_MOVED:
            entry = heapq.heappop(self.aged)
            if still(entry):
                self.missed += 1
                self._waits_no_more(entry[2])
                background, _, _, arrival = entry[1]
                moved.append((entry[2], (background, True, 0.0, arrival)))
        return moved

    def serve(self, seqs: list[Sequence], rows: Rows, kv_len_R: np.ndarray) -> None:
        cost_R = self.price.of_rows(rows, kv_len_R)
        if not self._flying:
            self._begun = self.clock()
        self._flying.append(float(cost_R.sum()))
        prompts = 0.0
        for row in (rows.kinds_R == RowKind.CHUNK).nonzero()[0].tolist():
            seq, cost = seqs[row].leader, cost_R.item(row)
            prompts += cost
            if seq in self._under_way:
                self._under_way[seq] = max(0.0, self._under_way[seq] - cost)
        self._decodes = self._flying[-1] - prompts
        self._largest = max(0.99 * self._largest, prompts, 1e-9)

    def ran(self) -> None:
        now = self.clock()
        self._steps.note(self._flying.popleft(), now - self._begun)
        self._begun = now

    def failed(self, seqs: list[Sequence], rows: Rows, kv_len_R: np.ndarray) -> None:
        self._flying.popleft()
        self._begun = self.clock()

    def figures(self) -> Mapping[str, float]:
        return {"slo: refused": self.refused, "slo: missed": self.missed}


class StepTimes:
    """The seconds of a step: so many in any case, and so many for each predicted millisecond, by linear regression on
    the newest steps. base, each: these two, neither below 0."""

    def __init__(self) -> None:
        self.base, self.each = 0.0, FIRST_PACE
        self._count = 0
        self._means = np.zeros(4)  # of the cost, the seconds, and the cost times each

    def seconds(self, cost: float) -> float:
        """Return the seconds of a step of so many predicted milliseconds."""
        return self.base + self.each * cost

    def note(self, cost: float, seconds: float) -> None:
        """Learn that a step of so many predicted milliseconds took so long."""
        self._count += 1
        new = np.array((cost, seconds, cost * cost, cost * seconds))
        self._means += max(LEARNS, 1 / self._count) * (new - self._means)
        x, y, xx, xy = self._means.tolist()
        spread = xx - x * x
        each = (xy - x * y) / spread if spread > 1e-6 * xx else 0.0
        if not 0 < each < y / x:  # steps of one size, or noise: all of it is for the cost
            each = y / x
        self.base, self.each = y - each * x, each
