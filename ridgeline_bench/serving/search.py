"""The most load under an objective: a search over request rates.

It takes for granted that a rate above one that misses the objective misses it too. A server's latencies grow with the
load, but a short measurement may miss by chance. So the answer's upper bound is measured twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.serving.figures import Point, Slo

SHARE = 0.99  # of all requests that must meet every bound
EXACT = 1.05  # the lowest rate that misses over the highest that meets, at which a search ends
MOST_POINTS = 24
FARTHEST = 1 << 10  # the first rate over the lowest one that is tried


@dataclass(frozen=True)
class Search:
    """The search for the highest rate at which SHARE of the requests meet `slo`."""

    slo: Slo

    @classmethod
    def parse(cls, text: str, rates: Sequence[float]) -> Search | None:
        """Return the search that --search-slo asks for, or None for an empty text. Raise InvalidConfig."""
        if not text:
            return None
        slo = Slo.parse(text, "--search-slo")
        if len(rates) != 1 or not 0 < rates[0] < math.inf:
            raise InvalidConfig("--search-slo begins at one finite --rate, such as --rate 1.")
        return cls(slo)

    def meets(self, point: Point) -> bool:
        return share(point) >= SHARE

    def points(self, first: float, measure: Callable[[float], Point | None]) -> Iterator[Point]:
        """Yield the points that are measured: from `first` on by factors of two until one rate meets and one misses,
        then between these. The lowest rate that misses is measured once more in the end, and the second time counts.
        `measure` returns None if there is no time left, which ends the search."""
        found: list[Point] = []
        rate = first
        for _ in range(MOST_POINTS):
            point = measure(rate)
            if point is None:
                return
            found.append(point)
            yield point
            meeting, missing = bounds(found, self)
            if missing * FARTHEST <= first:
                return
            rate = next_rate(meeting, missing)
            if missing <= EXACT * meeting:
                if [p.rate for p in found].count(missing) > 1:
                    return
                rate = missing


def bounds(points: Sequence[Point], search: Search) -> tuple[float, float]:
    """Return the lowest rate that misses (inf: none does), behind the highest one below it that meets (0: none). Of two
    points at one rate the second counts."""
    meets = {p.rate: search.meets(p) for p in points}
    missing = min((rate for rate, good in meets.items() if not good), default=math.inf)
    return max((rate for rate, good in meets.items() if good and rate < missing), default=0.0), missing


def next_rate(meeting: float, missing: float) -> float:
    """Return the rate to try next, with three digits. meeting, missing: the highest rate that meets and the lowest that
    misses (0, inf: none yet)."""
    if missing == math.inf:
        return rounded(2 * meeting)
    return rounded(math.sqrt(meeting * missing) if meeting else missing / 2)


def rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


def share(point: Point) -> float:
    """Return the share of all requests that met every bound, those that failed counted as missing."""
    return (point.goodput or 0.0) * point.duration / max(1, point.num_requests)


@dataclass(frozen=True)
class Found:
    """The outcome of a search. best: the highest rate that meets, or None. missing: the lowest that misses, or inf."""

    best: Point | None
    missing: float

    @classmethod
    def of(cls, points: Sequence[Point], search: Search) -> Found:
        meeting, missing = bounds(points, search)
        return cls(next((p for p in reversed(points) if p.rate == meeting), None), missing)

    def sentence(self, asked: str) -> str:
        """Return the outcome in words. asked: the objective as it was given."""
        least = f"{100 * SHARE:g} % of the requests"
        if self.best is None:
            return f"no rate was found at which {least} meet {asked}; {self.missing:g} requests/s miss it."
        above = f"{self.missing:g} requests/s miss it" if math.isfinite(self.missing) else "no rate was seen to miss it"
        if self.missing > EXACT * self.best.rate:
            above += ", and the search ended before it came nearer"
        return (
            f"{least} meet {asked} at up to {self.best.rate:g} requests/s, with {self.best.output_rate:,.0f} output "
            f"tokens/s; {above}. Rates above one that misses are taken to miss too."
        )
