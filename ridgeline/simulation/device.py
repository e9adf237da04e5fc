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
from ridgeline.simulation.tally import Tally
from ridgeline.simulation.traffic import Ask


class Running(NamedTuple):
    """A plan in flight. due: when its step ends. seconds: how long it takes."""

    plan: StepPlan
    due: float
    seconds: float


class Known(NamedTuple):
    """Facts about a set of rows, which stay while plans share it."""

    rows: Rows
    slots_R: np.ndarray
    tokens_R1: np.ndarray
    samples_R: np.ndarray
    all_sample: bool


class Device:
    """gaps: the times between tokens of one request. asks: open requests by their numbers, which are their seeds.
    slow: seconds between tokens from which on a gap counts in `over`."""

    def __init__(self, clock: Clock, times: StepTimes, slots: int, gaps: Tally, slow: float) -> None:
        self._clock, self._times, self._gaps, self._slow = clock, times, gaps, slow
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
        self._seen: tuple[Rows | None, float] = None, 0.0  # the rows that all got a token last, and when

    @property
    def due(self) -> float | None:
        """The moment at which the oldest plan's step ends; None if there is none."""
        return self._plans[0].due if self._plans else None

    # ---- the protocol of a worker -----------------------------------------------------------------------------

    def submit(self, plan: StepPlan) -> None:
        rows = plan.rows
        twice = sum((len(group.rows) - 1) * group.tokens for group in rows.prefixes)
        seconds = self._times.seconds(plan.shape(), twice)
        self._free_at = max(self._free_at, self._clock()) + seconds
        self._plans.append(Running(plan, self._free_at, seconds))

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
        rows = plan.rows
        known = self._known
        if known is None or known.rows is not rows:
            known = self._known = self._about(rows)
        slots_R = known.slots_R
        ends_R = plan.kv_bound_R + 1 >= self._end_S[slots_R]
        stopped_R = self._stopped_S[slots_R]
        if known.all_sample and not (ends_R.any() or stopped_R.any()):
            self._note(rows, slots_R, due)
            return StepResult(plan.id, known.tokens_R1, self._ones(len(rows)), self._zeros(len(rows)), elapsed=seconds)
        emits_R = known.samples_R & ~stopped_R
        ends_R &= emits_R
        finish_R = np.where(ends_R, self._finish_S[slots_R], 0).astype(np.int8)
        self._stopped_S[slots_R[ends_R]] = True
        self._note(rows, slots_R[emits_R], due, whole=False)
        tokens_R1 = np.where(emits_R[:, None], known.tokens_R1, -1).astype(np.int32)
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

    def _about(self, rows: Rows) -> Known:
        slots_R, samples_R = rows.slots_R.astype(np.intp), rows.num_logits_R > 0
        return Known(rows, slots_R, self._token_S[slots_R][:, None], samples_R, bool(samples_R.all()))

    def _note(self, rows: Rows, slots_R: np.ndarray, now: float, *, whole: bool = True) -> None:
        """Count the times since the rows' last tokens."""
        before, self._seen = self._seen, (rows if whole else None, now)
        if before[0] is rows and whole:  # the same requests, all of which got a token at that moment
            gap = now - before[1]
            self._gaps.add(gap, len(slots_R))
            if gap > self._slow:
                self._over_S[slots_R] += 1
        else:
            gaps_R = now - self._last_S[slots_R]
            self._over_S[slots_R] += gaps_R > self._slow
            self._gaps.add_all(gaps_R[~np.isnan(gaps_R)])
        self._last_S[slots_R] = now

    def _ones(self, count: int) -> np.ndarray:
        return np.ones(count, np.int32)

    def _zeros(self, count: int) -> np.ndarray:
        return np.zeros(count, np.int8)
