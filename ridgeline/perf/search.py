"""The search for the fastest of many candidates: cuts of a kernel, schedules of a loop nest, settings of an engine.

A model ranks all candidates before any of them runs. The best ones are prepared (compiled, and checked) and timed in
turns, so that a drift of the machine's clock hits all alike. A candidate that is far behind after few timings is
dropped. If the space has neighbours, more generations start from the best. All that was tried is in the record, with
the reason why it lost. The same seed, model and times give the same record.

    search = Search(cost=seconds_by_model, prepare=compiled_and_checked)
    found = search.run(candidates, always=[what_runs_today])
    found.best.candidate, found.best.seconds

`prepare` returns a function that runs the candidate once and returns the seconds of one run. It raises `Unfit` for a
candidate that cannot run or is wrong.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from statistics import median
from typing import Any, Generic, TypeVar

C = TypeVar("C", bound=Hashable)
Timer = Callable[[], float]


class Unfit(Exception):
    """A candidate that cannot run, or whose result is wrong. The message says why, for the record."""


class TrialOutcome(StrEnum):
    """The fate of a candidate."""

    WON = "won"
    SLOWER = "slower"  # timed to the end, and not the fastest
    BEHIND = "behind"  # dropped after few timings
    UNFIT = "unfit"
    LATE = "late"  # the time was over before it was timed
    UNTRIED = "untried"  # the model ranks it too low


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """The effort of a search.

    measured: candidates of the first generation that are prepared and timed, at most.
    drawn: so many others besides, drawn by the seed whatever the model says, to see what it misses.
    first, repeats: timings before a candidate can be dropped, and of one that stays to the end.
    behind: a candidate is dropped when its fastest time is this many times the fastest of all.
    tie: an earlier candidate keeps its place against one that is faster by less than this share.
    seconds: of the whole search. What runs is not interrupted, so a search ends one timing later at most.
    generations, children, parents: further generations, the new candidates that each times, and the fastest ones that
        they are neighbours of.
    seed: of the order of timings and of neighbours.
    """

    measured: int = 8
    drawn: int = 0
    first: int = 2
    repeats: int = 8
    behind: float = 1.15
    tie: float = 0.01
    seconds: float = 20.0
    generations: int = 0
    children: int = 4
    parents: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("measured", "first", "repeats", "children", "parents"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1.")
        if self.behind < 1 or self.drawn < 0 or not 0 <= self.tie < 1 or self.seconds <= 0 or self.generations < 0:
            raise ValueError(
                f"behind is {self.behind}, tie {self.tie}, seconds {self.seconds}, generations {self.generations}, "
                f"drawn {self.drawn}; give at least 1, a share below 1, more than 0, and at least 0."
            )


@dataclass(frozen=True)
class SearchTrial(Generic[C]):
    """All that is known of one candidate.

    predicted: its cost by the model. rank: its place by that, from 0. times: seconds of single runs.
    generation: 0 for those of the space, then 1, 2, … for neighbours.
    """

    candidate: C
    predicted: float
    rank: int
    times: tuple[float, ...]
    outcome: TrialOutcome
    reason: str = ""
    generation: int = 0

    @property
    def seconds(self) -> float:
        """The median of its times; infinity if it has none."""
        return median(self.times) if self.times else math.inf


@dataclass(frozen=True)
class Found(Generic[C]):
    """The record of a search: all trials, the measured ones first, by their times. took: its seconds."""

    trials: tuple[SearchTrial[C], ...]
    took: float

    @property
    def best(self) -> SearchTrial[C] | None:
        """The trial that won; None if no candidate was fit and in time."""
        return self.trials[0] if self.trials and self.trials[0].outcome is TrialOutcome.WON else None

    def of(self, candidate: C) -> SearchTrial[C] | None:
        """Return the trial of a candidate, or None if it was none."""
        return next((trial for trial in self.trials if trial.candidate == candidate), None)

    def record(self, described: Callable[[C], Any] = str) -> list[dict[str, Any]]:
        """Return a line for each trial, for JSON. described: what stands for a candidate."""
        return [
            {
                "candidate": described(trial.candidate), "outcome": trial.outcome.value, "rank": trial.rank,
                "predicted": float(f"{trial.predicted:.4g}") if math.isfinite(trial.predicted) else None,
                **({"us": round(1e6 * trial.seconds, 3), "timings": len(trial.times)} if trial.times else {}),
                **({"reason": trial.reason} if trial.reason else {}),
                **({"generation": trial.generation} if trial.generation else {}),
            }
            for trial in self.trials
        ]  # fmt: skip


def no_neighbours(candidate: Any, random: Random) -> Iterable[Any]:
    """Return nothing: the space has no neighbours."""
    return ()


def prepare_nothing(candidates: Sequence[Any]) -> None:
    """Do nothing: candidates are prepared one by one."""


@dataclass(frozen=True, kw_only=True)
class Search(Generic[C]):
    """A search in one space.

    cost: the model, in any unit that ranks candidates; infinity for one that cannot run, which is not tried then.
    prepare: compiles and checks a candidate, and returns what times one run; raises Unfit.
    together: is given all candidates that will be prepared, before the first one is, to compile them in parallel.
    neighbours: candidates that differ little from one. They may be any number; those seen before are left out.
    clock: returns seconds.
    """

    cost: Callable[[C], float]
    prepare: Callable[[C], Timer]
    together: Callable[[Sequence[C]], None] = prepare_nothing
    neighbours: Callable[[C, Random], Iterable[C]] = no_neighbours
    settings: SearchSettings = SearchSettings()
    clock: Callable[[], float] = time.monotonic

    def leading(self, candidates: Iterable[C], always: Sequence[C] = ()) -> list[C]:
        """Return the candidates that `run` would measure: those of `always`, the best by the model, and drawn ones."""
        ranked = self._ranked(candidates, always)
        return [one.candidate for one in ranked if not one.impossible][: self._most(always)]

    def run(self, candidates: Iterable[C], always: Sequence[C] = ()) -> Found[C]:
        """Return the record of a search.

        always: candidates that are measured whatever the model says, such as the one in use. Against the first of them
            others must be faster by more than `settings.tie`.
        """
        return _SearchRun(self, self._ranked(candidates, always), self._most(always)).found()

    def _most(self, always: Sequence[C]) -> int:
        return max(self.settings.measured, len(set(always))) + self.settings.drawn

    def _ranked(self, candidates: Iterable[C], always: Sequence[C]) -> list[_Entry[C]]:
        """Return entries of all candidates once: those of `always` that can run first, then by their costs, but for
        those that are drawn, which stand behind the ones to be measured."""
        costs = {each: _number(self.cost(each)) for each in dict.fromkeys((*always, *candidates))}
        places = {each: place for place, each in enumerate(sorted(costs, key=costs.__getitem__))}
        kept = {each: i for i, each in enumerate(dict.fromkeys(always))}
        order = sorted(
            costs, key=lambda each: (not math.isfinite(costs[each]), kept.get(each, len(kept)), places[each])
        )
        return [_Entry(each, costs[each], places[each]) for each in order]


def _number(cost: float) -> float:
    return math.inf if math.isnan(cost) else cost


@dataclass
class _Entry(Generic[C]):
    candidate: C
    predicted: float
    rank: int
    generation: int = 0
    timer: Timer | None = None
    times: list[float] = field(default_factory=list)
    outcome: TrialOutcome = TrialOutcome.UNTRIED
    reason: str = ""

    @property
    def impossible(self) -> bool:
        return not math.isfinite(self.predicted)

    @property
    def fastest(self) -> float:
        return min(self.times, default=math.inf)

    @property
    def seconds(self) -> float:
        return median(self.times) if self.times else math.inf

    def trial(self) -> SearchTrial[C]:
        return SearchTrial(
            self.candidate, self.predicted, self.rank, tuple(self.times), self.outcome, self.reason, self.generation
        )


class _SearchRun(Generic[C]):
    """One run of a search."""

    def __init__(self, search: Search[C], entries: list[_Entry[C]], most: int) -> None:
        self._search, self._settings, self._entries, self._most = search, search.settings, entries, most
        self._random, self._started = Random(search.settings.seed), search.clock()

    def found(self) -> Found[C]:
        for one in self._entries:
            if one.impossible:
                one.outcome, one.reason = TrialOutcome.UNFIT, "the model says that it cannot run"
        self._measure([one for one in self._entries if one.outcome is TrialOutcome.UNTRIED][: self._most])
        for generation in range(1, self._settings.generations + 1):
            if self._late() or not (born := self._born(generation)):
                break
            self._measure(born)
        done = self._standing()
        for one in done:
            one.outcome = TrialOutcome.SLOWER
        if done:
            self._winner(done).outcome = TrialOutcome.WON
        order = sorted(self._entries, key=lambda one: (one.outcome is not TrialOutcome.WON, one.seconds, one.rank))
        return Found(tuple(one.trial() for one in order), self._search.clock() - self._started)

    def _late(self) -> bool:
        return self._search.clock() - self._started >= self._settings.seconds

    def _standing(self) -> list[_Entry[C]]:
        """Return the entries that are timed, and neither unfit nor dropped."""
        return [
            one for one in self._entries if one.times and one.outcome in (TrialOutcome.UNTRIED, TrialOutcome.SLOWER)
        ]

    def _winner(self, done: list[_Entry[C]]) -> _Entry[C]:
        """Return the fastest entry, or the first of all if that is hardly slower."""
        best, first = min(done, key=lambda one: one.seconds), self._entries[0]
        return first if first in done and best.seconds >= (1 - self._settings.tie) * first.seconds else best

    def _born(self, generation: int) -> list[_Entry[C]]:
        """Return entries of new neighbours of the fastest, the best by the model."""
        known = {one.candidate for one in self._entries}
        parents = sorted(self._standing(), key=lambda one: one.seconds)[: self._settings.parents]
        near = dict.fromkeys(
            each
            for one in parents
            for each in self._search.neighbours(one.candidate, self._random)
            if each not in known
        )
        costs = {each: _number(self._search.cost(each)) for each in near}
        fit = sorted((each for each in costs if math.isfinite(costs[each])), key=costs.__getitem__)
        born = [_Entry(each, costs[each], len(known) + i, generation) for i, each in enumerate(fit)]
        self._entries += born
        return born[: self._settings.children]

    def _measure(self, chosen: list[_Entry[C]]) -> None:
        """Prepare entries, then time them in turns, and drop those that are far behind."""
        self._search.together([one.candidate for one in chosen])
        for one in chosen:
            if self._late():
                one.outcome = TrialOutcome.LATE
                continue
            try:
                one.timer = self._search.prepare(one.candidate)
            except Unfit as error:
                one.outcome, one.reason = TrialOutcome.UNFIT, str(error)
        alive = [one for one in chosen if one.timer is not None]
        for turn in range(self._settings.repeats):
            self._time_once(alive)
            best = min((one.fastest for one in self._standing()), default=math.inf)
            if turn + 1 >= self._settings.first:
                for one in alive:
                    if one.times and one.outcome is TrialOutcome.UNTRIED and one.fastest > self._settings.behind * best:
                        one.outcome = TrialOutcome.BEHIND
                        one.reason = f"{one.fastest / best:.2f} times the fastest after {len(one.times)} timings"
            alive = [one for one in alive if one.outcome is TrialOutcome.UNTRIED]
            if self._late() or (turn + 1 >= self._settings.first and len(self._standing()) <= 1):
                break
        for one in chosen:
            one.timer = None  # it may hold a device's memory
            if not one.times and one.outcome is TrialOutcome.UNTRIED:
                one.outcome = TrialOutcome.LATE

    def _time_once(self, alive: list[_Entry[C]]) -> None:
        for one in self._random.sample(alive, len(alive)):
            if self._late() and self._standing():
                return
            assert one.timer is not None
            try:
                seconds = one.timer()
            except Unfit as error:
                one.outcome, one.reason, one.times = TrialOutcome.UNFIT, str(error), []
                continue
            if not (math.isfinite(seconds) and seconds > 0):
                one.outcome, one.reason, one.times = TrialOutcome.UNFIT, f"its time was {seconds}", []
                continue
            one.times.append(seconds)
