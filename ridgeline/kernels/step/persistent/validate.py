"""Prove a schedule right before it is launched: that it ends, and that every run of it gives the same.

**It ends.** Counters only rise, so a task that may begin may still begin later, and all runs get equally far. One run
is therefore enough: if it comes to its end, every run does, provided that all blocks run at the same time.

**It gives the same.** Two accesses to a cell, one of them a write, must not happen in either order. For each such pair
the task that comes first in the schedule's own order must have *ended* before the other begins, in every run. What is
known to have ended before a task begins:

* what its block ran before it;
* of the signals of a counter that it waits for, those that cannot be missing. Tasks that come after it have not
  signalled. A signaller s cannot be missing if all others that do not come after s themselves are too few;
* all that had ended before those began.

In a schedule with marked buffers there are no counters: who reads a cell waits for itself. Then it is enough that each
cell is written once at most, so that nothing is overwritten, that only cells are read that some task writes, and that
the run ends. No buffer but marked ones, and inputs that no task writes, may be read there.

That is kept as one number for each task and block: how many of the block's tasks have ended. Facts follow from facts
that hold, so the proof is sound whatever the schedule is; it may refuse one that is right by more than this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from ridgeline.kernels.step.persistent.tasks import CellAccess, StepSchedule, StepTask

Clock = NDArray[np.int32]  # by block: how many of its tasks have ended


class InvalidSchedule(Exception):
    """A schedule that may hang, or whose result may differ from run to run. The message names task and cause."""


def validate(schedule: StepSchedule, resident: int) -> None:
    """Raise InvalidSchedule unless every run of the schedule ends, and gives what its tasks give one by one.

    resident: blocks that the device runs at the same time.
    """
    if len(schedule.blocks) > resident:
        raise InvalidSchedule(
            f"the schedule has {len(schedule.blocks)} blocks, and {resident} can run at the same time; make it so."
        )
    places = _places(schedule)
    if schedule.marked:
        _are_written_once(schedule)
        _run(schedule.with_counters)
        return
    order = _run(schedule)
    _no_races(schedule, places, _ended(schedule, places, order))


def _places(schedule: StepSchedule) -> NDArray[np.int32]:
    """Return the block of every task and its place there: int32 [tasks, 2]."""
    places = np.full((len(schedule.tasks), 2), -1, np.int32)
    for block, tasks in enumerate(schedule.blocks):
        for place, index in enumerate(tasks):
            if not 0 <= index < len(places) or places[index, 0] >= 0:
                raise InvalidSchedule(f"block {block} runs task {index}, which does not exist or which runs already.")
            places[index] = block, place
    if (missing := np.flatnonzero(places[:, 0] < 0)).size:
        raise InvalidSchedule(f"no block runs {schedule.tasks[missing[0]]}.")
    for task in schedule.tasks:
        if any(not 0 <= each < schedule.counters for each in (*task.signals, *(wait.counter for wait in task.waits))):
            raise InvalidSchedule(f"{task} has a counter beyond the schedule's {schedule.counters}.")
        for access in (*task.reads, *task.writes):
            _is_inside(schedule, task, access)
    return places


def _is_inside(schedule: StepSchedule, task: StepTask, access: CellAccess) -> None:
    rows, columns = schedule.buffers.get(access.buffer, (0, 0))
    inside = 0 <= access.row < access.row_end <= rows and 0 <= access.column < access.column_end <= columns
    if not inside:
        raise InvalidSchedule(f"{task} reaches beyond the buffer {access.buffer!r}, which is {rows} by {columns}.")


def _run(schedule: StepSchedule) -> list[int]:
    """Return the tasks in the order of one run. Raises InvalidSchedule if it does not end."""
    counters, at = [0] * schedule.counters, [0] * len(schedule.blocks)
    asleep: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by counter: what is waited for, and by which block
    awake, order = list(range(len(at))), []
    while awake:
        block = awake.pop()
        while at[block] < len(schedule.blocks[block]):
            task = schedule.tasks[schedule.blocks[block][at[block]]]
            if short := next((wait for wait in task.waits if counters[wait.counter] < wait.least), None):
                heappush(asleep[short.counter], (short.least, block))
                break
            order.append(schedule.blocks[block][at[block]])
            at[block] += 1
            for counter in task.signals:
                counters[counter] += 1
                while (waits := asleep[counter]) and waits[0][0] <= counters[counter]:
                    awake.append(heappop(waits)[1])
    if len(order) < len(schedule.tasks):
        block = next(block for block, tasks in enumerate(schedule.blocks) if at[block] < len(tasks))
        task = schedule.tasks[schedule.blocks[block][at[block]]]
        counter, least = next(wait for wait in task.waits if counters[wait.counter] < wait.least)
        raise InvalidSchedule(
            f"block {block} waits for ever before {task}: counter {counter} ends at {counters[counter]}, not {least}."
        )
    return order


def _are_written_once(schedule: StepSchedule) -> None:
    """Raise InvalidSchedule if a schedule of marked buffers writes a cell twice, has counters, or reads what may not be
    written yet."""
    written = {name: np.full(size, -1, np.int64) for name, size in schedule.buffers.items()}
    for index, task in enumerate(schedule.tasks):
        if task.waits or task.signals:
            raise InvalidSchedule(f"{task} has counters, and marked buffers need none; leave them out.")
        for access in task.writes:
            cells = written[access.buffer][access.row : access.row_end, access.column : access.column_end]
            if access.buffer in schedule.inputs or (cells >= 0).any():
                other = "a step's input" if access.buffer in schedule.inputs else schedule.tasks[int(cells.max())]
                raise InvalidSchedule(f"{task} writes {access}, which is not its own alone: {other} is there.")
            cells[...] = index
    for index, task in enumerate(schedule.tasks):
        for access in task.reads:
            if access.buffer not in schedule.marked | schedule.inputs:
                raise InvalidSchedule(
                    f"{task} reads {access}, and nothing says that this was written; mark the buffer."
                )
            cells = written[access.buffer][access.row : access.row_end, access.column : access.column_end]
            if access.buffer in schedule.marked and ((cells < 0) | (cells >= index)).any():
                raise InvalidSchedule(f"{task} reads {access}, and no task before it writes all of that.")


@dataclass
class _Signals:
    """The signals of a counter: its tasks, and how often each of them signals."""

    tasks: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)


def _ended(schedule: StepSchedule, places: NDArray[np.int32], order: Sequence[int]) -> Clock:
    """Return for every task how many tasks of each block have ended when it begins: int32 [tasks, blocks]."""
    signals: dict[int, _Signals] = defaultdict(_Signals)
    for index, task in enumerate(schedule.tasks):
        for counter in dict.fromkeys(task.signals):
            signals[counter].tasks.append(index)
            signals[counter].times.append(task.signals.count(counter))
    clocks = np.zeros((len(places), len(schedule.blocks)), np.int32)
    clocks[np.arange(len(places)), places[:, 0]] = places[:, 1]
    before = -1
    while (known := int(clocks.sum(dtype=np.int64))) != before:  # facts that later facts bring
        before = known
        joined: dict[tuple[int, int], Clock] = {}
        for index in order:
            block, place = places[index]
            if place:
                np.maximum(clocks[index], clocks[schedule.blocks[block][place - 1]], out=clocks[index])
            for wait in schedule.tasks[index].waits:
                if wait.least < 1:
                    continue
                found = joined.get(wait)
                if found is None:
                    given = signals[wait.counter]
                    found, shared = _sure(index, wait.least, given, clocks, places)
                    if shared:
                        joined[wait] = found
                np.maximum(clocks[index], found, out=clocks[index])
            clocks[index, block] = place
    return clocks


def _sure(index: int, least: int, given: _Signals, clocks: Clock, places: NDArray[np.int32]) -> tuple[Clock, bool]:
    """Return the clock of the end of a wait, and True if that is so for every task with this wait."""
    tasks, times = np.array(given.tasks), np.array(given.times)
    if times.sum() == least:  # none may be missing
        return _joined(tasks, clocks, places), True
    block, place = places[index]
    may = (clocks[tasks, block] <= place) & (tasks != index)  # what comes after this task has not signalled
    tasks, times = tasks[may], times[may]
    # comes[s, x]: x begins only after s has ended, or is s itself
    comes = places[tasks, 1][:, None] < clocks[tasks][:, places[tasks, 0]].T
    np.fill_diagonal(comes, True)
    sure = tasks[times.sum() - (comes * times).sum(1) < least]
    return _joined(sure, clocks, places), False


def _joined(tasks: NDArray[np.int64], clocks: Clock, places: NDArray[np.int32]) -> Clock:
    """Return the clock of the end of all these tasks."""
    found = clocks[tasks].max(0, initial=0)
    np.maximum.at(found, places[tasks, 0], places[tasks, 1] + 1)
    return found


class _Cells:
    """A buffer, as cells that no access divides: the last write of each, and the reads since, as a clock."""

    def __init__(self, schedule: StepSchedule, name: str, accesses: Sequence[CellAccess]) -> None:
        self._rows = _numbered({edge for each in accesses for edge in (each.row, each.row_end)})
        self._columns = _numbered({edge for each in accesses for edge in (each.column, each.column_end)})
        size = len(self._rows) - 1, len(self._columns) - 1
        self.known = name in schedule.inputs
        self.writer = np.full(size, -1, np.int64)
        self.readers = np.zeros((*size, len(schedule.blocks)), np.int32)

    def at(self, access: CellAccess) -> tuple[slice, slice]:
        rows, columns = self._rows, self._columns
        return (
            slice(rows[access.row], rows[access.row_end]),
            slice(columns[access.column], columns[access.column_end]),
        )


def _numbered(edges: set[int]) -> dict[int, int]:
    """Return the number of each edge in their order."""
    return {edge: number for number, edge in enumerate(sorted(edges))}


def _no_races(schedule: StepSchedule, places: NDArray[np.int32], clocks: Clock) -> None:
    """Raise InvalidSchedule if two tasks touch a cell whose order is not certain, or if one reads what none wrote."""
    accesses: dict[str, list[CellAccess]] = defaultdict(list)
    for task in schedule.tasks:
        for access in (*task.reads, *task.writes):
            accesses[access.buffer].append(access)
    cells = {name: _Cells(schedule, name, found) for name, found in accesses.items()}
    for index, task in enumerate(schedule.tasks):
        block, place = places[index]
        for access in task.reads:
            buffer = cells[access.buffer]
            where = buffer.at(access)
            _follows(schedule, places, clocks, index, access, buffer.writer[where], buffer.known)
            buffer.readers[where][..., block] = np.maximum(buffer.readers[where][..., block], place + 1)
        for access in task.writes:
            buffer = cells[access.buffer]
            where = buffer.at(access)
            _follows(schedule, places, clocks, index, access, buffer.writer[where], True)
            readers = buffer.readers[where].reshape(-1, len(schedule.blocks)).max(0)
            if readers[block] == place + 1:  # it may read what it overwrites
                readers[block] = place
            if late := np.flatnonzero(readers > clocks[index]).tolist():
                reader = schedule.tasks[schedule.blocks[late[0]][readers[late[0]] - 1]]
                raise InvalidSchedule(f"{task} may overwrite {access} while {reader} still reads it.")
            buffer.writer[where] = index
            buffer.readers[where] = 0


def _follows(
    schedule: StepSchedule, places: NDArray[np.int32], clocks: Clock, index: int, access: CellAccess,
    writers: NDArray[np.int64], known: bool,
) -> None:  # fmt: skip
    """Raise InvalidSchedule unless all these writers have ended before a task begins."""
    found = writers.ravel()
    if not known and found.min() < 0:
        raise InvalidSchedule(f"{schedule.tasks[index]} reads {access}, and no task before it writes all of that.")
    late = found[(clocks[index, places[found, 0]] <= places[found, 1]) & (found >= 0) & (found != index)]
    if late.size:
        writer = schedule.tasks[late[0]]
        raise InvalidSchedule(f"{schedule.tasks[index]} may touch {access} before {writer} has written it.")
