"""The passes that make views of pictures, as tables that a kernel reads. Free of torch.

A resize has two passes, one along each axis. A pass writes a rectangle of pixels to a scratch buffer; the last one of
a view writes rows of numbers. Passes that several views share, such as a first resize of the whole picture, run once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ridgeline.kernels.pictures.patches.tables import ResizeStage, inner, patches_of, stages, taps
from ridgeline.kernels.pictures.views import RGB, Box, Patching, View

PIXEL = 3  # bytes
LAST = 1 << 30  # the level of passes that write rows


class PixelBlock(NamedTuple):
    """A rectangle of pixels in memory. start: its first byte. top, left: the place of its first pixel."""

    start: int
    rows: int
    columns: int
    top: int = 0
    left: int = 0


class PassJob(NamedTuple):
    """One pass, as the kernel reads it: a row of int64.

    source, source_columns, source_rows: the first byte, and the size in pixels.
    down, right: what is added to a place to find it in the source.
    target: the first byte in the scratch buffer, or the first row of numbers.
    rows, columns: of what is written.
    first, weights, taps: where the table of taps begins, and how many there are.
    fill: the color outside, a byte each.
    top, left, inner_rows, inner_columns: the part of what is written that is not outside. Of a last pass alone.
    slot: which frame of a patch it is; -1: all of them.
    outside: 1: what is outside becomes zeros, and not the color.
    """

    source: int
    source_rows: int
    source_columns: int
    down: int
    right: int
    target: int
    rows: int
    columns: int
    first: int
    weights: int
    taps: int
    fill: int
    top: int = 0
    left: int = 0
    inner_rows: int = 0
    inner_columns: int = 0
    slot: int = -1
    outside: int = 0


class PassLaunch(NamedTuple):
    """Jobs that run together. vertical: along columns. raw: they read pictures. last: they write rows."""

    jobs: np.ndarray
    vertical: bool
    raw: bool
    last: bool

    def tiles(self, high: int, wide: int) -> int:
        """Return the most tiles of high x wide numbers that a job has."""
        rows, columns = self.jobs[:, 6], self.jobs[:, 7] * PIXEL
        return int((-(-rows // high) * -(-columns // wide)).max())


class PassPlan(NamedTuple):
    """launches: in order. tables: the taps, int32. scratch: its bytes. rows: of all views."""

    launches: tuple[PassLaunch, ...]
    tables: np.ndarray
    scratch: int
    rows: int


@lru_cache(maxsize=64)
def plan(sizes: tuple[tuple[int, int], ...], views: tuple[View, ...], patching: Patching) -> PassPlan:
    """Return the passes for views of pictures of `sizes` (height, width), which lie one after the other."""
    return _Planner(sizes, patching).plan(views)


class _Planner:
    """Collects jobs by the launch that they belong to, and the tables that they share."""

    def __init__(self, sizes: Sequence[tuple[int, int]], patching: Patching) -> None:
        starts = np.cumsum([0, *(PIXEL * height * width for height, width in sizes)]).tolist()
        self._pictures = [PixelBlock(start, *size) for start, size in zip(starts, sizes, strict=False)]
        self._patching = patching
        self._jobs: dict[tuple[int, bool, bool, bool], list[PassJob]] = {}
        self._tables: list[np.ndarray] = []
        self._length = 0
        self._placed: dict[tuple[int, int], tuple[int, int]] = {}
        self._made: dict[object, PixelBlock] = {}
        self._scratch = 0

    def plan(self, views: Sequence[View]) -> PassPlan:
        row = 0
        for view in views:
            for slot, frame in enumerate(view.frames):
                self._add(view, frame, row, slot if len(view.frames) > 1 else -1)
            row += patches_of(view, self._patching)
        launches = tuple(PassLaunch(np.array(jobs, np.int64), *key[1:]) for key, jobs in sorted(self._jobs.items()))
        return PassPlan(launches, np.concatenate(self._tables), self._scratch, row)

    def _add(self, view: View, frame: int, row: int, slot: int) -> None:
        source = self._pictures[frame]
        steps = stages(view, (source.rows, source.columns))
        for number, step in enumerate(steps[:-1]):
            key = (frame, view.fill, steps[: number + 1])
            if key not in self._made:
                whole = Box(0, 0, step.height, step.width)
                half = self._first(source, step, whole, view.fill, 2 * number)
                self._made[key] = self._scratched(2 * number + 1, half, step, not step.columns_first, whole, view.fill)
            source = self._made[key]
        step, window = steps[-1], view.window
        inside = inner(window, step.height, step.width)
        half = self._first(source, step, inside, view.fill, 2 * len(steps) - 2)
        job = self._job(half, step, not step.columns_first, inside, view.fill)._replace(
            target=row,
            rows=window.rows,
            columns=window.columns,
            top=inside.top - window.top,
            left=inside.left - window.left,
            inner_rows=inside.rows,
            inner_columns=inside.columns,
            slot=slot,
        )
        self._jobs.setdefault((LAST, not step.columns_first, False, True), []).append(job)

    def _first(self, source: PixelBlock, step: ResizeStage, inside: Box, fill: RGB | None, level: int) -> PixelBlock:
        """Add the first pass of a resize, of what the second needs for the part inside, and return what it makes."""
        if step.columns_first:
            low, high = self._needed(step.box.columns, step.width, inside.left, inside.columns)
            made = Box(inside.top, low, inside.rows, high - low)
        else:
            low, high = self._needed(step.box.rows, step.height, inside.top, inside.rows)
            made = Box(low, inside.left, high - low, inside.columns)
        return self._scratched(level, source, step, step.columns_first, made, fill)

    def _needed(self, old: int, new: int, start: int, count: int) -> tuple[int, int]:
        """Return the first of the old pixels that are needed, and the one behind the last."""
        if not count:
            return 0, 0
        axis = taps(old, new, self._patching.filter)
        return int(axis.first_Q[start]), min(int(axis.first_Q[start + count - 1]) + axis.weights_QK.shape[1], old)

    def _scratched(
        self, level: int, source: PixelBlock, step: ResizeStage, vertical: bool, made: Box, fill: RGB | None
    ) -> PixelBlock:
        """Add a pass that writes to the scratch buffer. Level 0 reads pictures."""
        job = self._job(source, step, vertical, made, fill)._replace(target=self._scratch)
        if job.rows and job.columns:
            self._jobs.setdefault((level, vertical, level == 0, False), []).append(job)
        start = self._scratch
        self._scratch += PIXEL * made.rows * made.columns
        return PixelBlock(start, made.rows, made.columns, made.top, made.left)

    def _job(self, source: PixelBlock, step: ResizeStage, vertical: bool, made: Box, fill: RGB | None) -> PassJob:
        old, new, start = (
            (step.box.rows, step.height, made.top) if vertical else (step.box.columns, step.width, made.left)
        )
        first, weights, count = self._place(old, new)
        raw = source in self._pictures
        top, left = (-step.box.top, -step.box.left) if raw else (source.top, source.left)
        red, green, blue = fill or (0, 0, 0)
        return PassJob(
            source.start,
            source.rows,
            source.columns,
            (0 if vertical else made.top) - top,
            (made.left if vertical else 0) - left,
            0,
            made.rows,
            made.columns,
            first + start,
            weights + start * count,
            count,
            red | green << 8 | blue << 16,
            outside=int(fill is None),
        )

    def _place(self, old: int, new: int) -> tuple[int, int, int]:
        """Return the places of an axis' taps in the tables: of the first pixels, of the weights, and their number."""
        axis = taps(old, new, self._patching.filter)
        if (old, new) not in self._placed:
            self._placed[old, new] = self._length, self._length + new
            self._tables += [axis.first_Q, axis.weights_QK.reshape(-1)]
            self._length += new + axis.weights_QK.size
        return *self._placed[old, new], axis.weights_QK.shape[1]
