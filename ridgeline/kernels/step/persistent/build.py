"""The task graph of a decoding step, made from the shape of the network.

Every product is divided by outputs, evenly between all blocks, so that each reads its part of the weights once. The
norm before a product is computed by every block for itself: its input is small, and a task of its own would cost one
more wait of all blocks. The residual is added where a product's outputs are written.

A phase has one counter. Its tasks wait for all tasks of the phase before, whose reads and writes are then over. Or
buffers are marked: each phase then has a buffer of its own in each layer, and waits for what it reads.
"""

from __future__ import annotations

from collections.abc import Iterable

from ridgeline.kernels.step.persistent.shape import ROWS, DenseShape
from ridgeline.kernels.step.persistent.tasks import CellAccess, CounterWait, Kind, StepSchedule, StepTask


def build(
    shape: DenseShape, rows: int, blocks: int, splits: int = 1, *, joins: bool = False, marked: bool = False
) -> StepSchedule:
    """Return the schedule of a step.

    rows: requests, 1 to 8.
    blocks: that run at the same time.
    splits: parts of a row's keys that different blocks attend to. With more than one, tasks that combine them follow.
    joins: in place of these tasks, each block combines the parts for itself when it reads them for `out`. That spares
        a wait, and costs the reads of all parts in every block.
    marked: buffers are marked, and there are no counters.

    Raises ValueError for other rows, blocks or splits.
    """
    if not 1 <= rows <= ROWS or blocks < 1 or splits < 1:
        raise ValueError(f"a step needs 1 to {ROWS} rows, blocks and splits: not {rows}, {blocks} and {splits}.")
    return _Builder(shape, rows, blocks, splits, joins and splits > 1, marked).schedule()


class _Builder:
    def __init__(self, shape: DenseShape, rows: int, blocks: int, splits: int, joins: bool, marked: bool) -> None:
        self._shape, self._rows, self._splits, self._joins, self._marked = shape, rows, splits, joins, marked
        self._tasks: list[StepTask] = []
        self._blocks: list[list[int]] = [[] for _ in range(blocks)]
        self._counter, self._before = 0, 0  # of the phase that is being made, and the tasks of the one before
        self._turn = 0  # the block that gets the next task which is not a product
        self._sums = 0  # of the residual that came so far: a marked one has a buffer for each

    def schedule(self) -> StepSchedule:
        shape, rows, splits = self._shape, self._rows, self._splits
        self._spread("embed", 0, ((row,) for row in range(rows)))
        for layer in range(shape.layers):
            self._product("qkv", layer, shape.projected)
            pairs = [(row, head) for row in range(rows) for head in range(shape.kv_heads)]
            self._spread("attend", layer, ((*pair, split) for pair in pairs for split in range(splits)))
            if splits > 1 and not self._joins:
                self._spread("combine", layer, pairs)
            self._product("out", layer, shape.width)
            self._product("gate_up", layer, shape.inner)
            self._product("down", layer, shape.width)
        self._product("head", shape.layers, shape.vocabulary)
        caches = {f"new_kv.{layer}": (rows, shape.kv_heads) for layer in range(shape.layers)}
        sizes = {
            "residual": shape.width, "qkv": shape.projected, "attended": shape.attended,
            "partial": shape.kv_heads * splits, "gated": shape.inner, "logits": shape.vocabulary,
        }  # fmt: skip
        accesses = [access for task in self._tasks for access in (*task.reads, *task.writes)]
        used = dict.fromkeys(access.buffer for access in accesses if not access.buffer.startswith("new_kv"))
        buffers = {name: (rows, sizes[name.partition(".")[0]]) for name in used} | caches
        marked = frozenset(used).difference(["logits"]) if self._marked else frozenset()
        return StepSchedule(
            tasks=tuple(self._tasks), blocks=tuple(map(tuple, self._blocks)),
            counters=0 if self._marked else self._counter, buffers=buffers, marked=marked,
        )  # fmt: skip

    def _product(self, kind: Kind, layer: int, outputs: int) -> None:
        """Add a phase in which each block has its share of the outputs."""
        count = len(self._blocks)
        edges = [outputs * block // count for block in range(count + 1)]
        parts = [(block, edges[block : block + 2]) for block in range(count) if edges[block] < edges[block + 1]]
        self._phase(kind, layer, [(block, (start, stop)) for block, (start, stop) in parts])

    def _spread(self, kind: Kind, layer: int, parts: Iterable[tuple[int, ...]]) -> None:
        """Add a phase whose tasks go to one block after the other."""
        placed = []
        for part in parts:
            placed.append((self._turn % len(self._blocks), part))
            self._turn += 1
        self._phase(kind, layer, placed)

    def _phase(self, kind: Kind, layer: int, placed: list[tuple[int, tuple[int, ...]]]) -> None:
        waits = (CounterWait(self._counter - 1, self._before),) if self._counter and not self._marked else ()
        signals = () if self._marked else (self._counter,)
        for block, part in placed:
            reads, writes = self._accesses(kind, layer, part)
            task = StepTask(kind=kind, layer=layer, part=part, reads=reads, writes=writes, waits=waits, signals=signals)
            self._blocks[block].append(len(self._tasks))
            self._tasks.append(task)
        self._counter, self._before = self._counter + 1, len(placed)
        self._sums += kind in ("out", "down")

    def _name(self, buffer: str, layer: int, later: int = 0) -> str:
        """Return the name of a layer's buffer. later: 1 for the residual to which a task has added."""
        if not self._marked or buffer == "logits":
            return buffer
        return f"{buffer}.{self._sums + later if buffer == 'residual' else layer}"

    def _accesses(
        self, kind: Kind, layer: int, part: tuple[int, ...]
    ) -> tuple[tuple[CellAccess, ...], tuple[CellAccess, ...]]:
        shape, rows = self._shape, self._rows
        if kind == "embed":
            return (), (CellAccess(self._name("residual", 0), part[0], part[0] + 1, 0, shape.width),)
        if kind in ("attend", "combine"):
            return self._of_head(kind, layer, part)
        attended = ("partial", shape.kv_heads * self._splits) if self._joins else ("attended", shape.attended)
        source, width, target = {
            "qkv": ("residual", shape.width, "qkv"), "out": (*attended, "residual"),
            "gate_up": ("residual", shape.width, "gated"), "down": ("gated", shape.inner, "residual"),
            "head": ("residual", shape.width, "logits"),
        }[kind]  # fmt: skip
        read = CellAccess(self._name(source, layer), 0, rows, 0, width)
        wrote = CellAccess(self._name(target, layer, 1), 0, rows, *part)
        before = wrote._replace(buffer=self._name(target, layer))
        return (read, before) if target == "residual" else (read,), (wrote,)

    def _of_head(
        self, kind: Kind, layer: int, part: tuple[int, ...]
    ) -> tuple[tuple[CellAccess, ...], tuple[CellAccess, ...]]:
        shape, splits, (row, head) = self._shape, self._splits, part[:2]
        row_end = row + 1
        wide = shape.group * shape.head_dim
        attended = CellAccess(self._name("attended", layer), row, row_end, head * wide, (head + 1) * wide)
        if kind == "combine":
            partial = CellAccess(self._name("partial", layer), row, row_end, head * splits, (head + 1) * splits)
            return (partial,), (attended,)
        heads = [(head * shape.group, shape.group), (shape.heads + head, 1), (shape.heads + shape.kv_heads + head, 1)]
        reads = tuple(
            CellAccess(self._name("qkv", layer), row, row_end, at * shape.head_dim, (at + count) * shape.head_dim)
            for at, count in heads
        )
        place = head * splits + part[2]
        partial = CellAccess(self._name("partial", layer), row, row_end, place, place + 1)
        wrote = attended if splits == 1 else partial
        # Which split has the row's last token is known on the device alone. The first one stands for it here: no other
        # task of the step touches the place of the new key.
        fresh = (CellAccess(f"new_kv.{layer}", row, row_end, head, head + 1),) if part[2] == 0 else ()
        return reads, (wrote, *fresh)
