"""The last hour of an engine's figures, for the dashboard's charts.

A file beside the engine's socket holds one row for every two seconds. The engine writes it and every API server reads
it, so all show the same picture, and it outlives both. Its size is fixed: a row's place follows from its time, and the
row of an hour ago is overwritten.

Rows hold totals since the engine started, as `Stats` does, so rates and percentiles are differences between rows.

Legend:
    P  points in time
    C  columns: times in ms, durations in µs, and counts
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.serving.observed.histograms import BOUNDS
from ridgeline.transport.messages import Stats

PERIOD = 2.0  # seconds between points
POINTS = 1800
SILENT = 15_000  # ms without a point after which one of several engines is taken to run nothing
COUNTERS = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")
HISTOGRAMS = ("time_to_first_token_seconds", "inter_token_latency_seconds")
AT, STARTED, GAUGES = 0, 1, slice(2, 5)  # the gauges: running, waiting, pages_used
FIXED = 8  # and num_pages, step_seconds, limit_seconds
COLUMNS = FIXED + len(COUNTERS) + sum(len(BOUNDS[name]) + 1 for name in HISTOGRAMS)


class Past:
    """The file of the engine with this socket."""

    def __init__(self, socket: str) -> None:
        self._path = Path(f"{socket}.past")
        self._newest = -1  # slot that was written last

    def note(self, stats: Stats) -> None:
        """Write a point, if none was written for its time. Without room on the disk there is none."""
        slot = int(stats.at / PERIOD)
        if slot == self._newest:
            return
        self._newest = slot
        row = np.array(_row(stats), np.int64)
        with suppress(OSError):
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:  # with its time at both ends: a row that is being written has two
                os.pwrite(file, np.append(row, row[AT]).tobytes(), slot % POINTS * (COLUMNS + 1) * row.itemsize)
            finally:
                os.close(file)

    def read(self) -> np.ndarray:
        """Return the points of the last hour that there are, the oldest first. [P, C]"""
        try:
            rows = np.fromfile(self._path, np.int64)
        except OSError:
            rows = np.zeros(0, np.int64)
        width = COLUMNS + 1
        rows = rows[: len(rows) // width * width].reshape(-1, width)
        rows = rows[(rows[:, AT] > 0) & (rows[:, AT] == rows[:, -1])]
        rows = rows[np.argsort(rows[:, AT])]
        return rows[rows[:, AT] > rows[-1:, AT].sum() - 1000 * PERIOD * POINTS, :-1]


def _row(stats: Stats) -> list[int]:
    fixed = [1000 * stats.at, 1000 * stats.started, stats.running, stats.waiting, stats.pages_used, stats.num_pages]
    fixed += [1e6 * stats.step_seconds, 1e6 * stats.limit_seconds, *(stats.counters[name] for name in COUNTERS)]
    return [*map(int, fixed), *(count for name in HISTOGRAMS for count in stats.histograms[name].counts)]


def together(pasts_PC: Sequence[np.ndarray]) -> np.ndarray:
    """Return the past of several engines as that of one, from where on each of them has a point. As in `summed`, an
    engine that was replaced changes `started`. [P, C]"""
    if len(pasts_PC) == 1 or any(not len(past) for past in pasts_PC):
        return pasts_PC[0] if len(pasts_PC) == 1 else np.zeros((0, COLUMNS), np.int64)
    period = round(1000 * PERIOD)
    slots = [past[:, AT] // period for past in pasts_PC]
    all_P = np.unique(np.concatenate(slots))
    all_P = all_P[all_P >= max(own[0] for own in slots)]
    held = [past[np.searchsorted(own, all_P, "right") - 1] for past, own in zip(pasts_PC, slots, strict=True)]
    for rows in held:
        rows[(all_P + 1) * period - rows[:, AT] > SILENT + period, GAUGES] = 0
    sums = np.sum(held, axis=0)
    for column in (AT, STARTED):
        sums[:, column] = np.max([rows[:, column] for rows in held], axis=0)
    return sums


def told(pasts_PC: Sequence[np.ndarray], after: float) -> dict[str, Any]:
    """Return the points after a time, as the page reads them: of each row but the first the difference to the one
    before, which is mostly zeros."""
    points = together(pasts_PC)
    points = points[points[:, AT] > 1000 * after]
    rows = np.diff(points, axis=0, prepend=np.zeros_like(points[:1]))
    return {"counters": COUNTERS, "bounds": {name: BOUNDS[name] for name in HISTOGRAMS}, "rows": rows.tolist()}
