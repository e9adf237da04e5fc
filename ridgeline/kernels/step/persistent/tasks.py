"""The task graph of a step: what each block does, one task after the other, and which counters it waits for.

A task reads and writes rectangles of buffers. It begins when every counter that it waits for has come far enough, and
when it has ended it adds one to each of its own. Blocks run at the same time and know nothing else of each other.

A *marked* buffer needs no counter: each of its cells holds a mark until it is written, once in a step, and who reads a
cell waits until it holds something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

Kind = Literal["embed", "qkv", "attend", "combine", "out", "gate_up", "down", "head"]
PRODUCTS = ("qkv", "out", "gate_up", "down", "head")  # the kinds that stream weights


class CellAccess(NamedTuple):
    """A rectangle of a buffer: rows from `row` to before `row_end`, and columns so."""

    buffer: str
    row: int
    row_end: int
    column: int
    column_end: int

    def meets(self, other: CellAccess) -> bool:
        """Return True if both have a cell in common."""
        rows = self.row < other.row_end and other.row < self.row_end
        return (
            self.buffer == other.buffer and rows and self.column < other.column_end and other.column < self.column_end
        )


class CounterWait(NamedTuple):
    """A task begins when the counter is at least this."""

    counter: int
    least: int


@dataclass(frozen=True, kw_only=True)
class StepTask:
    """A piece of work of one block.

    part: of a product, its first output and the one behind the last. Of attention: row, key head, split; of a
        combination: row, key head; of an embedding: row.
    signals: counters to which it adds one when it has ended. One that is named twice gets two.
    """

    kind: Kind
    layer: int
    part: tuple[int, ...]
    reads: tuple[CellAccess, ...] = ()
    writes: tuple[CellAccess, ...] = ()
    waits: tuple[CounterWait, ...] = ()
    signals: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.part} of layer {self.layer}"


@dataclass(frozen=True, kw_only=True)
class StepSchedule:
    """The tasks of a step and where they run.

    tasks: in an order in which they would be right if they ran one after the other. This is what a schedule means:
        the validator proves that every run of the blocks gives the same.
    blocks: by block, its tasks as indices into `tasks`, in the order in which it runs them.
    counters: how many there are. All are 0 when the step begins.
    buffers: rows and columns of each.
    inputs: buffers that hold numbers when the step begins.
    marked: buffers full of marks when the step begins.
    """

    tasks: tuple[StepTask, ...]
    blocks: tuple[tuple[int, ...], ...]
    counters: int
    buffers: Mapping[str, tuple[int, int]]
    inputs: frozenset[str] = field(default_factory=frozenset)
    marked: frozenset[str] = field(default_factory=frozenset)

    @property
    def with_counters(self) -> StepSchedule:
        """This schedule with a counter for every rectangle of marked buffers that is read: all tasks that write some of
        it signal it when they have written. The same runs end."""
        writers: dict[str, list[tuple[CellAccess, int]]] = {}
        for index, task in enumerate(self.tasks):
            for access in task.writes:
                if access.buffer in self.marked:
                    writers.setdefault(access.buffer, []).append((access, index))
        counters: dict[CellAccess, CounterWait] = {}
        signals = [list(task.signals) for task in self.tasks]
        waits = [list(task.waits) for task in self.tasks]
        for index, task in enumerate(self.tasks):
            for access in task.reads:
                if access.buffer not in self.marked:
                    continue
                if access not in counters:
                    found = [writer for written, writer in writers.get(access.buffer, ()) if written.meets(access)]
                    counters[access] = CounterWait(self.counters + len(counters), len(found))
                    for writer in found:
                        signals[writer].append(counters[access].counter)
                waits[index].append(counters[access])
        tasks = tuple(
            replace(task, waits=tuple(waits[index]), signals=tuple(signals[index]))
            for index, task in enumerate(self.tasks)
        )
        return replace(self, tasks=tasks, counters=self.counters + len(counters), marked=frozenset())
