"""A worker whose steps take the time that a cost model gives, and whose tokens are those that traffic says.

It takes plans as a GPU's worker does: several may be submitted, they run one after the other, and a slot's state comes
with deltas. Positions and ends are its own, as on a device: a row that has stopped emits nothing in later plans.

Legend:
    R  rows of a plan
    S  slots
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ridgeline.core.clock import Clock
from ridgeline.core.plan.step import Assign, Finish, MaskedDrafts, Release, Rows, StepPlan, StepResult
from ridgeline.perf.step_time import StepTimes
from ridgeline.simulation.bus import HostBus
from ridgeline.simulation.tally import Tally
from ridgeline.simulation.traffic import Ask


class Running(NamedTuple):
    """A plan in flight. due: when its step ends. seconds: how long it takes."""

    plan: StepPlan
    due: float
    seconds: float


class Known(NamedTuple):
    """Facts about a set of rows, which stay while plans share it and none of them has stopped.

    quiet_until: while the first row's cached tokens are fewer, every row gets a token and none ends. result: of such a
    plan: tokens, how many of them, and reasons to end.
    """

    rows: Rows
    slots_R: np.ndarray
    samples_R: np.ndarray
    quiet_until: int
    result: tuple[np.ndarray, np.ndarray, np.ndarray]


class SentRows(NamedTuple):
    """Rows that were submitted last, which run one token each. first: cached tokens of the first one after that step.
    keys, longest: those of all, and of the longest one."""

    rows: Rows
    first: int
    keys: int
    longest: int


class Device:
    """gaps: the times between tokens of one request. asks: open requests by their numbers, which are their seeds.
    slow: seconds between tokens from which on a gap counts in `over`. bus: to the host's memory, if blocks go there."""

    def __init__(
        self, clock: Clock, times: StepTimes, slots: int, gaps: Tally, slow: float, bus: HostBus | None = None
    ) -> None:
        self._clock, self._times, self._gaps, self._slow, self._bus = clock, times, gaps, slow, bus
        self.asks: dict[int, Ask] = {}
        self.busy = 0.0  # seconds of all steps so far
        self.steps = 0
        self._plans: deque[Running] = deque()
        self._free_at = 0.0
        self._token_S = np.zeros(slots, np.int32)
        self._end_S = np.zeros(slots, np.int64)  # known tokens after the last one
        self._finish_S = np.zeros(slots, np.int8)
        self._stopped_S = np.zeros(slots, np.bool_)
        self._last_S = np.zeros(slots)  # when the slot's last token came; nan: none has
        self._over_S = np.zeros(slots, np.int64)
        self._number: dict[int, int] = {}  # slot → its request
        self._slot: dict[int, int] = {}
        self._away: dict[int, tuple[float, int]] = {}  # of preempted requests
        self._known: Known | None = None
        self._sent: SentRows | None = None
        self._seen: tuple[Rows | None, float] = None, 0.0  # the rows that all got a token last, and when

    @property
    def due(self) -> float | None:
        """The moment at which the oldest plan's step ends; None if there is none."""
        return self._plans[0].due if self._plans else None

    # ---- the protocol of a worker -----------------------------------------------------------------------------

    def submit(self, plan: StepPlan) -> None:
        seconds = self._seconds(plan)
        begin = max(self._free_at, self._clock())
        if self._bus is not None:
            begin = self._bus.begin(plan.moves, begin)
        self._free_at = begin + seconds
        self._plans.append(Running(plan, self._free_at, seconds))

    def _seconds(self, plan: StepPlan) -> float:
        """Return the seconds of a plan's step. While the same rows decode, all of them grow alike."""
        rows, kv_len_R, found = plan.rows, plan.kv_bound_R, None
        twice = sum((len(group.rows) - 1) * group.tokens for group in rows.prefixes) if rows.prefixes else 0
        if rows.tokens_each == 1 and not plan.spans and len(rows):
            first = int(kv_len_R[0])
            if self._sent is not None and self._sent.rows is rows:
                more = first - self._sent.first
                sent = SentRows(rows, first, self._sent.keys + more * len(rows), self._sent.longest + more)
            else:
                sent = SentRows(rows, first, int(np.add.reduce(kv_len_R)), int(np.maximum.reduce(kv_len_R)))
            self._sent = sent
            found = self._times.of_decoding(len(rows), sent.keys, sent.longest, twice)
        return self._times.seconds(plan.shape(), twice) if found is None else found

    def provide_masks(
        self, plan_id: int, masks: Mapping[int, np.ndarray], drafts: Mapping[int, MaskedDrafts] | None = None
    ) -> None: ...

    def collect(self) -> StepResult:
        plan, due, seconds = self._plans.popleft()
        assert self._clock() == due, "a step is collected when it ends"
        self.busy += seconds
        self.steps += 1
        for delta in plan.deltas:
            if isinstance(delta, Assign):
                self._assign(delta)
            elif isinstance(delta, Release):
                self._release(delta.slot)
        rows, known = plan.rows, self._known
        if known is None or known.rows is not rows:
            known = self._known = self._about(rows, plan.kv_bound_R)
        slots_R = known.slots_R
        if len(rows) and plan.kv_bound_R[0] < known.quiet_until:
            self._note(rows, slots_R, due)
            return StepResult(plan.id, *known.result, elapsed=seconds)
        emits_R = known.samples_R & ~self._stopped_S[slots_R]
        ends_R = emits_R & (plan.kv_bound_R + 1 >= self._end_S[slots_R])
        finish_R = np.where(ends_R, self._finish_S[slots_R], 0).astype(np.int8)
        self._stopped_S[slots_R[ends_R]] = True
        self._known = None
        self._note(rows, slots_R[emits_R], due, whole=False)
        tokens_R1 = np.where(emits_R[:, None], known.result[0], -1).astype(np.int32)
        return StepResult(plan.id, tokens_R1, emits_R.astype(np.int32), finish_R, elapsed=seconds)

    def shutdown(self) -> None: ...

    # ---- slots ------------------------------------------------------------------------------------------------

    def over(self, number: int) -> int:
        """Return the number of gaps of an open request that took longer than `slow`."""
        slot = self._slot.get(number)
        return int(self._over_S[slot]) if slot is not None else self._away.get(number, (0.0, 0))[1]

    def forget(self, number: int) -> None:
        """Forget a request that has ended."""
        self.asks.pop(number, None)
        self._away.pop(number, None)
        if (slot := self._slot.pop(number, None)) is not None:
            del self._number[slot]

    def _assign(self, form: Assign) -> None:
        slot, ask = form.slot, self.asks[form.seed]
        self._number[slot], self._slot[form.seed] = form.seed, slot
        self._token_S[slot] = ask.answer.content
        self._end_S[slot] = len(form.prompt) + ask.answer.tokens
        self._finish_S[slot] = Finish.LENGTH if self._end_S[slot] >= form.max_total_tokens else Finish.STOP
        self._stopped_S[slot] = False
        self._last_S[slot], self._over_S[slot] = self._away.pop(form.seed, (np.nan, 0))

    def _release(self, slot: int) -> None:
        if (number := self._number.pop(slot, None)) is not None:  # it was preempted
            self._away[number] = float(self._last_S[slot]), int(self._over_S[slot])
            del self._slot[number]

    def _about(self, rows: Rows, kv_len_R: np.ndarray) -> Known:
        slots_R, samples_R = rows.slots_R.astype(np.intp), rows.num_logits_R > 0
        count, until = len(rows), 0
        if count and np.count_nonzero(samples_R) == count and not np.count_nonzero(self._stopped_S[slots_R]):
            until = int(kv_len_R[0]) + int(np.minimum.reduce(self._end_S[slots_R] - kv_len_R)) - 1
        result = self._token_S[slots_R][:, None], np.ones(count, np.int32), np.zeros(count, np.int8)
        return Known(rows, slots_R, samples_R, until, result)

    def _note(self, rows: Rows, slots_R: np.ndarray, now: float, *, whole: bool = True) -> None:
        """Count the times since the rows' last tokens. Most rows got theirs at the end of the step before."""
        (seen, before), self._seen = self._seen, (rows if whole else None, now)
        count = len(slots_R)
        if not (whole and seen is rows):  # some may be others than got one at that moment
            last_R = self._last_S[slots_R]
            at_R = (last_R != before).nonzero()[0]
            count -= len(at_R)
            for at, last in zip(at_R.tolist(), last_R[at_R].tolist(), strict=True):
                if last == last:  # it had one
                    self._gaps.add(now - last)
                    self._over_S[slots_R[at]] += now - last > self._slow
            slots_R, every_R = slots_R if not len(at_R) else slots_R[last_R == before], slots_R
        else:
            every_R = slots_R
        if count:
            self._gaps.add(now - before, count)
            if now - before > self._slow:
                self._over_S[slots_R] += 1
        self._last_S[every_R] = now
