"""The waits of ranks for each other, derived from notes that all ranks made (`parallel.stamps`).

Ranks leave a collective together, to within the time of a message, so the rank that stays in it for the shortest time
came last, and each other rank waited for it during its additional time. That needs no common clock. A trace needs one:
clocks are compared when ranks begin, by a question whose answer is at most as old as the time that it took. Clocks of
devices drift later, by microseconds a second; they are corrected by the ends of the step's collectives.

Legend:
    K  notes of a step
    C  collectives of a step
    R  ranks
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.rank_waits import RankWaits
from ridgeline.parallel.stamps import KINDS, RECEIVED, SEGMENT, TOGETHER

logger = logging.getLogger(__name__)

COLLECTIVES, RECEIVES = (tuple(map(KINDS.index, names)) for names in (TOGETHER, RECEIVED))
PERIOD = 0.1  # seconds between traces at least: writing one takes milliseconds
KEPT = 64  # traces
NEWEST = 128  # steps that shares are of


class Event(NamedTuple):
    """An interval in which a rank did something, in nanoseconds."""

    kind: int
    nbytes: int
    start: int
    end: int


class Clocks(NamedTuple):
    """The ranks' clocks against the leader's, in nanoseconds. uncertain: by how much each may be off."""

    offsets: Sequence[int]
    uncertain: int = 0

    @staticmethod
    def of(rounds: Sequence[tuple[int, Sequence[int], int]]) -> Clocks:
        """Return the clocks that the questions' answers imply. rounds: (the leader's time before the question, each
        rank's answer, its time after it). The quickest round counts. A clock whose difference is below the error counts
        as the leader's own."""
        before, answers, after = min(rounds, key=lambda each: each[2] - each[0])
        half = (after - before) // 2
        offsets = [answer - (before + half) for answer in answers]
        return Clocks([0 if abs(own) <= half else own for own in offsets], half)

    @property
    def drifting(self) -> bool:
        """True if the clocks of other ranks differ from the leader's."""
        return any(self.offsets)


@dataclass(frozen=True)
class StepWaits:
    """One step of all ranks.

    events: of each rank, by its own clock, in the order of their ends.
    collectives: those of `events` that all ranks took part in; empty if ranks did not do the same.
    waited_RC: nanoseconds that a rank waited in each. last_C: the rank that came last.
    received_R: nanoseconds that a rank waited for messages of others.
    """

    events: Sequence[Sequence[Event]]
    collectives: Sequence[Sequence[Event]]
    waited_RC: NDArray[np.int64]
    last_C: NDArray[np.int64]
    received_R: NDArray[np.int64]

    @staticmethod
    def of(notes: Sequence[NDArray[np.int64]]) -> StepWaits:
        events = [events_of(notes_K2) for notes_K2 in notes]
        collectives = [[event for event in own if event.kind in COLLECTIVES] for own in events]
        alike = {tuple((event.kind, event.nbytes) for event in own) for own in collectives}
        if len(alike) > 1:  # stages of a pipeline, or a step that one rank alone failed
            collectives = [[] for _ in events]
        stay_RC = np.array([[event.end - event.start for event in own] for own in collectives], np.int64)
        stay_RC = stay_RC.reshape(len(events), -1)
        waited_RC = stay_RC - stay_RC.min(0)
        received = [sum(event.end - event.start for event in own if event.kind in RECEIVES) for own in events]
        return StepWaits(events, collectives, waited_RC, stay_RC.argmin(0), np.array(received, np.int64))

    @property
    def waited_R(self) -> NDArray[np.float64]:
        """The seconds that each rank waited."""
        return (self.waited_RC.sum(1) + self.received_R) / 1e9

    @property
    def seconds(self) -> list[float]:
        """The time of each rank's segments."""
        return [sum(event.end - event.start for event in own if event.kind == SEGMENT) / 1e9 for own in self.events]

    def caused(self, rank: int) -> float:
        """Return the seconds for which the longest waiting rank waited for this rank alone."""
        return float(self.waited_RC.max(0, initial=0)[self.last_C == rank].sum()) / 1e9

    def shifts(self, clocks: Clocks) -> list[int]:
        """Return the offset to subtract from each rank's clock to get the first rank's."""
        ends_RC = np.array([[event.end for event in own] for own in self.collectives], np.int64)
        if not clocks.drifting or not ends_RC.size:
            return [offset - clocks.offsets[0] for offset in clocks.offsets]
        return [int(np.median(ends_C - ends_RC[0])) for ends_C in ends_RC]


def events_of(notes_K2: NDArray[np.int64]) -> list[Event]:
    """Return the events of a rank, from its notes. A beginning without an end, or the other way round, is left out."""
    open_: dict[int, int] = {}
    found = []
    for at, what in notes_K2.tolist():
        kind, nbytes = what >> 1 & 0x7FFF, what >> 16
        if not what & 1:
            open_[kind] = at
        elif kind in open_:
            found.append(Event(kind, nbytes, open_.pop(kind), at))
    return found


def trace(step: StepWaits, shifts: Sequence[int], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step in Chrome's trace format (Perfetto shows it too): a row for each rank, on the first one's clock."""
    begin = min(
        (event.start - shift for own, shift in zip(step.events, shifts, strict=True) for event in own), default=0
    )
    shown: list[dict[str, Any]] = []
    for rank, (own, shift) in enumerate(zip(step.events, shifts, strict=True)):
        shown.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        number = 0
        for event in own:
            arguments: dict[str, Any] = {}
            if event.kind in COLLECTIVES and number < step.waited_RC.shape[1]:
                last, waited = int(step.last_C[number]), int(step.waited_RC[rank, number])
                arguments = {"bytes": event.nbytes, "last": f"rank {last}"}
                number += 1
                if waited:
                    shown.append(_slice(f"waits for rank {last}", rank, event.start - shift - begin, waited, {}))
            name = KINDS[event.kind] if event.kind < len(KINDS) else "?"
            shown.append(_slice(name, rank, event.start - shift - begin, event.end - event.start, arguments))
    return {"traceEvents": shown, "displayTimeUnit": "ns", "otherData": dict(facts)}


def _slice(name: str, rank: int, start: int, length: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "pid": 0, "tid": rank, "ts": start / 1e3, "dur": length / 1e3, "args": arguments,
    }  # fmt: skip


class Waits:
    """The notes of a group's ranks, as its leader gets them, and what they say. folder: where traces go."""

    def __init__(self, size: int, folder: Path) -> None:
        self._size, self._folder = size, folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidConfig(f"traces of ranks cannot be written to {folder} ({error}).") from error
        self.clocks = Clocks([0] * size)
        self._open: dict[int, dict[int, NDArray[np.int64]]] = {}
        self._steps, self._waited, self._caused = np.zeros(size), np.zeros(size), np.zeros(size)
        self._recent: deque[tuple[list[float], NDArray[np.float64]]] = deque(maxlen=NEWEST)
        self._written: deque[Path] = deque()
        self._worst, self._due = 0.0, 0.0

    def note(self, rank: int, plan_id: int, notes_K2: NDArray[np.int64] | None) -> None:
        """Take what a rank noted in a step. The step is looked at when all ranks' notes are there."""
        if notes_K2 is None:
            return
        step = self._open.setdefault(plan_id, {})
        step[rank] = notes_K2
        if len(step) == self._size:
            self._look(plan_id, StepWaits.of([step[number] for number in range(self._size)]))
            for old in [number for number in self._open if number <= plan_id]:  # a step that failed has no notes
                del self._open[old]

    def ranks(self) -> list[RankWaits]:
        """Return the waits of every rank."""
        steps = sum((np.array(seconds) for seconds, _ in self._recent), np.zeros(self._size))
        waited = sum((waited_R for _, waited_R in self._recent), np.zeros(self._size))
        return [
            RankWaits(
                rank,
                float(self._steps[rank]),
                float(self._waited[rank]),
                float(self._caused[rank]),
                float(waited[rank] / steps[rank]) if steps[rank] else 0.0,
            )
            for rank in range(self._size)
        ]

    def _look(self, plan_id: int, step: StepWaits) -> None:
        waited_R, seconds = step.waited_R, step.seconds
        caused = [step.caused(rank) for rank in range(self._size)]
        self._steps += seconds
        self._waited += waited_R
        self._caused += caused
        self._recent.append((seconds, waited_R))
        worst = float(waited_R.max())
        if (now := time.monotonic()) >= self._due or worst > self._worst:
            self._due = now + PERIOD
            facts = {
                "plan": plan_id,
                "waited_us": [round(1e6 * seconds, 3) for seconds in waited_R],
                "caused_us": [round(1e6 * seconds, 3) for seconds in caused],
                "step_us": [round(1e6 * own, 3) for own in seconds],
                "waited_for_most": int(np.argmax(caused)) if max(caused) else None,
                "clock_offsets_ns": list(self.clocks.offsets),
                "clock_uncertainty_ns": self.clocks.uncertain,
            }
            made = trace(step, step.shifts(self.clocks), facts)
            self._write(made, plan_id, worst=worst > self._worst)
            self._worst = max(self._worst, worst)

    def _write(self, made: Mapping[str, Any], plan_id: int, *, worst: bool) -> None:
        """Keep a trace, and let the oldest go. A second file is that of the step in which a rank waited longest."""
        text = json.dumps(made)
        path = self._folder / f"step-{os.getpid()}-{plan_id:08}.json"
        try:
            path.write_text(text)
            if worst:
                (self._folder / f"longest-{os.getpid()}.json").write_text(text)
            self._written.append(path)
            if len(self._written) > KEPT:
                self._written.popleft().unlink(missing_ok=True)
        except OSError as error:
            logger.warning("the ranks' trace cannot be written (%s)", error)
