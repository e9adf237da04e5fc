"""Counts of times: how often each occurred, within a thousandth of it, in constant memory."""

from __future__ import annotations

import math

import numpy as np

LEAST, STEP = 1e-7, math.log1p(1e-3)  # seconds; and the logarithm of one bin's end by its begin
BINS = 32_768  # up to 1e7 seconds


class Tally:
    def __init__(self) -> None:
        self._counts = np.zeros(BINS, np.int64)
        self.count, self.total = 0, 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a time, `times` times."""
        self._counts[min(BINS - 1, int(math.log(max(seconds, LEAST) / LEAST) / STEP))] += times
        self.count += times
        self.total += seconds * times

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """Return the least time that at least `percent` % of the counted ones do not exceed, or 0 if there are none."""
        if not self.count:
            return 0.0
        wanted = max(1, math.ceil(self.count * percent / 100))
        found = int(np.searchsorted(np.cumsum(self._counts), wanted))
        return LEAST * math.exp((found + 0.5) * STEP)
