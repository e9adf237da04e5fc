"""Verdicts on whether B is slower than A, by paired measurements and a bootstrap interval of the ratio of their
medians.

A machine drifts (clocks, temperature, neighbours), and single times have outliers. So A and B are measured in turn, in
alternating order, and pairs are resampled as pairs. What slows both drops out of the ratio, and medians ignore
outliers. A difference counts only if the whole interval lies beyond the threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ridgeline.core.errors import InvalidConfig

Verdict = Literal["faster", "slower", "no difference"]

RESAMPLES = 4000
FEWEST = 5  # samples on each side; a median of fewer has no useful interval
CONFIDENCE = 0.99


@dataclass(frozen=True)
class Comparison:
    """The comparison of B with A: the ratio of median times (above 1: B is slower), its interval, and the verdict."""

    ratio: float
    low: float
    high: float
    threshold: float

    @property
    def verdict(self) -> Verdict:
        if self.low > 1 + self.threshold:
            return "slower"
        return "faster" if self.high < 1 / (1 + self.threshold) else "no difference"

    @property
    def sure(self) -> bool:
        """True if "no difference" is known to be below the threshold, rather than hidden by noise."""
        return self.verdict != "no difference" or (
            self.low >= 1 / (1 + self.threshold) and self.high <= 1 + self.threshold
        )

    def __str__(self) -> str:
        interval = f"{100 * (self.ratio - 1):+.1f} % [{100 * (self.low - 1):+.1f}, {100 * (self.high - 1):+.1f}]"
        return f"{self.verdict}: {interval}" + ("" if self.sure else ", too noisy to be sure")


def compare(
    a: Sequence[float], b: Sequence[float], *, threshold: float = 0.02, paired: bool = False, seed: int = 0
) -> Comparison:
    """Compare times, or anything where less is better, of A and of B. `paired`: a[i] and b[i] were measured side by
    side.

    Differences below the share `threshold` count as none. Raise InvalidConfig for too few samples, or any not above 0.
    """
    times_a, times_b = np.asarray(a, float), np.asarray(b, float)
    if min(len(times_a), len(times_b)) < FEWEST:
        raise InvalidConfig(
            f"a verdict needs at least {FEWEST} samples a side, got {len(a)} and {len(b)}; repeat runs."
        )
    if paired and len(times_a) != len(times_b):
        raise InvalidConfig(f"pairs need as many samples on both sides, got {len(a)} and {len(b)}.")
    if not all(np.isfinite(x).all() and (x > 0).all() for x in (times_a, times_b)):
        raise InvalidConfig("samples must be finite and above 0.")
    random = np.random.default_rng(seed)
    picks_a = random.integers(len(times_a), size=(RESAMPLES, len(times_a)))
    picks_b = picks_a if paired else random.integers(len(times_b), size=(RESAMPLES, len(times_b)))
    ratios = np.median(times_b[picks_b], axis=1) / np.median(times_a[picks_a], axis=1)
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Comparison(float(np.median(times_b) / np.median(times_a)), float(low), float(high), threshold)


def in_turn(a: Callable[[], float], b: Callable[[], float], pairs: int) -> tuple[list[float], list[float]]:
    """Return `pairs` measurements of each side, A first in every other pair, after one of each that does not count."""
    a(), b()
    times: tuple[list[float], list[float]] = [], []
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            times[which].append((a, b)[which]())
    return times
