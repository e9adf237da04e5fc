"""Conversion of outcomes to figures. Except for errors only answers that arrived whole and right count. All times are
in ms."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.child import percentile
from ridgeline_bench.serving.outcome import Outcome
from ridgeline_bench.serving.run import Run

PERCENTS = (50, 90, 99)
MEASURES = ("ttft", "itl", "tpot", "e2e")
LATE = 10.0  # ms: if one request in a hundred leaves later than this, the client is what is being measured
BUSY = 0.85  # share of a core


class Spread(NamedTuple):
    """The spread of a measure, in ms. `samples` are in order of departure."""

    mean: float
    p50: float
    p90: float
    p99: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        values = [1e3 * s for s in seconds]
        mean = math.fsum(values) / len(values) if values else 0.0
        p50, p90, p99 = (percentile(values, percent) for percent in PERCENTS)
        return cls(mean, p50, p90, p99, tuple(values))


@dataclass(frozen=True)
class Slo:
    """Upper bounds in ms, by measure. A request's `itl` is the 99th percentile of its own."""

    bounds: Mapping[str, float]

    @classmethod
    def parse(cls, text: str, option: str = "--slo") -> Slo:
        """Return the bounds of a text such as "ttft=200,itl=20". Raise InvalidConfig, naming the option."""
        bounds = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            try:
                bounds[name.strip()] = float(value)
            except ValueError:
                raise InvalidConfig(f"{option} needs NAME=MILLISECONDS, got {part!r}.") from None
            if name.strip() not in MEASURES or not bounds[name.strip()] > 0:
                raise InvalidConfig(f"{option} knows {', '.join(MEASURES)}, each above 0 ms, got {part!r}.")
        return cls(bounds)

    def met_by(self, outcome: Outcome) -> bool:
        return not outcome.error and all(1e3 * _of(outcome, name) <= bound for name, bound in self.bounds.items())


def _of(outcome: Outcome, measure: str) -> float:
    if measure == "itl":
        return percentile(outcome.itls, 99)
    found: float | None = getattr(outcome, measure)
    return found or 0.0


@dataclass(frozen=True, kw_only=True)
class Point:
    """The figures of one rate.

    `rate` is the rate asked for (inf: all at once; 0: a trace's own), and `duration` the seconds from the start to the
    last end. `request_rate`, `output_rate`, `total_rate` and `goodput` are per second of that; goodput is None without
    --slo. `offered` is the requests a second that really left (0 if all left at once), and `lateness` how much later
    than due they left. `cached` is the share of prompt tokens that came out of the prefix cache. `peak` is the most
    requests open at once, and `busy` the share of a core that the busiest client process used. `exact` means that token
    counts are the server's.
    """

    rate: float
    num_requests: int
    num_completed: int
    errors: Mapping[str, int]
    examples: Mapping[str, str]
    duration: float
    offered: float
    request_rate: float
    output_rate: float
    total_rate: float
    goodput: float | None
    latencies: Mapping[str, Spread]
    lateness: Spread
    peak: int
    cached: float
    busy: float
    exact: bool

    @property
    def name(self) -> str:
        return rate_name(self.rate)

    @property
    def warnings(self) -> Iterator[str]:
        """The reasons why these figures may be the client's rather than the server's, and what they leave out."""
        if self.lateness.p99 > LATE and not math.isinf(self.rate):
            yield (
                f"at {self.name} one request in a hundred left {self.lateness.p99:.0f} ms late or more: the client was "
                "the bottleneck; give it cores or --client-processes."
            )
        if self.busy > BUSY:
            yield (
                f"at {self.name} a client process used {100 * self.busy:.0f} % of its core, so latencies hold its own "
                "delays; raise --client-processes."
            )
        for kind, count in self.errors.items():
            yield f"at {self.name} {count} of {self.num_requests} failed: {kind} ({self.examples[kind]})"
        if not self.exact:
            yield f"at {self.name} the server does not say how many tokens a piece has: its itl is per piece."


def rate_name(rate: float) -> str:
    return "trace" if rate == 0 else "inf" if math.isinf(rate) else f"{rate:g}/s"


def point(rate: float, run: Run, slo: Slo) -> Point:
    """Return the figures of a rate. If no request completed, they are 0."""
    good = [o for o in run.outcomes if not o.error]
    failed = [o for o in run.outcomes if o.error]
    duration = max((o.end for o in run.outcomes), default=0.0)
    output, prompt = (math.fsum(getattr(o, name) for o in good) for name in ("output_tokens", "prompt_tokens"))
    last_sent = max((o.sent for o in run.outcomes), default=0.0)

    def per_second(count: float) -> float:
        return count / duration if duration else 0.0

    spreads = {
        "ttft": Spread.of([o.ttft for o in good]),
        "itl": Spread.of(list(itertools.chain.from_iterable(o.itls for o in good))),
        "tpot": Spread.of([o.tpot for o in good if o.tpot is not None]),
        "e2e": Spread.of([o.e2e for o in good]),
    }
    return Point(
        rate=rate,
        num_requests=len(run.outcomes),
        num_completed=len(good),
        errors=dict(Counter(o.error for o in failed).most_common()),
        examples={o.error: o.message for o in reversed(failed)},
        duration=duration,
        offered=len(run.outcomes) / last_sent if last_sent and rate < math.inf else 0.0,
        request_rate=per_second(len(good)),
        output_rate=per_second(output),
        total_rate=per_second(output + prompt),
        goodput=per_second(sum(map(slo.met_by, good))) if slo.bounds else None,
        latencies=spreads,
        lateness=Spread.of([o.late for o in run.outcomes]),
        peak=_peak(run.outcomes),
        cached=math.fsum(o.cached_tokens for o in good) / prompt if prompt else 0.0,
        busy=run.busy,
        exact=all(o.exact for o in good),
    )


def _peak(outcomes: Sequence[Outcome]) -> int:
    """Return the most requests that were open at once."""
    changes = sorted([(o.sent, 1) for o in outcomes] + [(o.end, -1) for o in outcomes])
    return max(itertools.accumulate(change for _, change in changes), default=0)
