"""The number of CPU threads that share the loops of a step, chosen again where steps show that it does not fit.

All threads of a loop wait for the slowest one. Where another program takes one of the cores, a step may therefore take
several times as long as with a thread less. Steps show that: they take longer than they did for the same work. Then a
few steps run with fewer threads, as many as there are cores that other programs leave free, and the faster number
stays. Where there are fewer threads than there may be, more are tried now and then in the same way: a program with
more threads also gets more of the time of cores that are wanted by several.

Another number of threads may add up a product in another order, and round its last bit otherwise. So a number that the
user has set stays.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

from ridgeline.core.cores import Load, available
from ridgeline.core.plan.step import StepPlan

SET_BY_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
STEPS = 8  # that are compared
FAR = 1.5  # times what steps took for the same work: from there on fewer threads are tried
GAIN = 0.9  # another number stays if its steps take less than this share of the time
DEAREST = 1.5  # a trial ends early that has taken so many times as long as the steps before it
FEW, MANY = 64, 512  # steps between trials: twice as many each time that nothing changed
RISE = 1.002  # what steps took, as it is remembered, grows by so much with each step, so that old times are forgotten
SINGLE = 32  # tokens up to which each number of them is work of its own
MOST_KINDS = 4096  # of work whose times are remembered


class Work(NamedTuple):
    """The work of a step. Steps of the same kind take time in proportion to their size."""

    kind: tuple[int, int]
    size: int = 1

    @staticmethod
    def of(plan: StepPlan) -> Work:
        tokens, cached = plan.num_tokens, int(plan.kv_bound_R.sum()).bit_length()
        return Work((tokens, cached)) if tokens <= SINGLE else Work((-tokens.bit_length(), cached), tokens)


class Step(NamedTuple):
    """The seconds that a step took, and those that its work usually takes."""

    seconds: float
    usual: float


class Threads:
    """Chooses the number for each step.

    most: the greatest number.
    free: returns how many cores other programs leave free; None: it is unknown.
    """

    def __init__(self, most: int, free: Callable[[], int | None]) -> None:
        self.most, self._free = most, free
        self.count = min(most, free() or most)
        self._usual: dict[tuple[int, tuple[int, int]], float] = {}  # seconds, by threads and kind of work
        self._newest = deque[Step](maxlen=STEPS)
        self._trial: Trial | None = None
        self._since, self._patience = 0, {False: 0, True: STEPS}  # steps; by whether more threads are tried

    @staticmethod
    def where_they_may_change(load: Load) -> Threads | None:
        """Return a choice from torch's number of threads on, or None where that is the user's, or one."""
        most = min(torch.get_num_threads(), available())
        chosen = most < 2 or any(name in os.environ for name in SET_BY_USER)
        return None if chosen else Threads(most, load.free)

    def begin(self) -> None:
        """Give the number to torch, in the thread that runs the next step."""
        if torch.get_num_threads() != self.count:
            torch.set_num_threads(self.count)

    def note(self, work: Work, seconds: float) -> None:
        """Learn how long a step took with the number of threads that there were, and choose that of the next."""
        usual = self._remember(work, seconds)
        if self._trial is not None:
            before = self._usual.get((self._trial.before, work.kind))
            self._judge(self._trial, Step(seconds, 0.0 if before is None else before * work.size))
            return
        self._newest.append(Step(seconds, usual * work.size))
        self._since += 1
        if len(self._newest) < STEPS:
            return
        if self.count < self.most and self._since >= self._patience[True]:
            self._try(more=True)
        elif self.count > 1 and self._since >= self._patience[False] and _slowness(self._newest) > FAR:
            self._try(more=False)

    def _remember(self, work: Work, seconds: float) -> float:
        """Return the least seconds, for its size, that such work took with this number of threads."""
        if len(self._usual) >= MOST_KINDS:
            self._usual.clear()
        key, seconds = (self.count, work.kind), seconds / work.size
        self._usual[key] = usual = min(seconds, RISE * self._usual.get(key, seconds))
        return usual

    def _try(self, *, more: bool) -> None:
        """Let the next steps run with another number of threads."""
        free, now = self._free(), self.count
        if more:
            self.count = free if free is not None and now < free < self.most else self.most
        else:
            self.count = max(1, min(now - 1, now * 3 // 4 if free is None else free))
        self._trial = Trial(now, _slowness(self._newest), DEAREST * sum(step.seconds for step in self._newest))

    def _judge(self, trial: Trial, step: Step) -> None:
        """Take a step of a trial in, and end the trial where it has shown enough."""
        trial.steps.append(step)
        dear = sum(each.seconds for each in trial.steps) > trial.longest
        if len(trial.steps) < STEPS and not dear:
            return
        compared = [each for each in trial.steps if each.usual]  # work that was done with the other number too
        more = self.count > trial.before
        if compared and not dear and _slowness(compared) < GAIN * trial.slowness:
            self._patience = {more: STEPS, not more: max(FEW, self._patience[not more])}
        else:
            self.count = trial.before
            self._patience[more] = min(MANY, max(FEW, 2 * self._patience[more]))
        self._trial, self._since = None, 0
        self._newest.clear()


class Trial:
    """Steps with another number of threads.

    before: the number that they are compared with, whose steps took `slowness` times what they usually do.
    longest: the seconds after which it ends early.
    """

    def __init__(self, before: int, slowness: float, longest: float) -> None:
        self.before, self.slowness, self.longest = before, slowness, longest
        self.steps: list[Step] = []


def _slowness(steps: Collection[Step]) -> float:
    """Return the time of steps relative to their usual time."""
    return sum(step.seconds for step in steps) / sum(step.usual for step in steps)
