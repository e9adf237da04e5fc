"""Counts of a simulation, and the figures that follow."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.core.plan.request import RequestStats
from ridgeline.simulation.tally import Tally
from ridgeline.simulation.traffic import Ask

PERCENTS = (50, 90, 99)


@dataclass(frozen=True)
class Bounds:
    """Bounds on the times of a request, in seconds (inf: none). itl: of the 99th percentile of its own gaps. tpot: of
    their mean."""

    ttft: float = math.inf
    itl: float = math.inf
    tpot: float = math.inf
    e2e: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A measure in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: array[float]) -> Spread:
        ordered = sorted(values)
        mean = math.fsum(ordered) / len(ordered) if ordered else 0.0
        at = [ordered[max(0, math.ceil(len(ordered) * p / 100) - 1)] if ordered else 0.0 for p in PERCENTS]
        return cls(mean=1e3 * mean, p50=1e3 * at[0], p90=1e3 * at[1], p99=1e3 * at[2])

    @classmethod
    def counted(cls, tally: Tally) -> Spread:
        at = [1e3 * tally.percentile(p) for p in PERCENTS]
        return cls(mean=1e3 * tally.mean, p50=at[0], p90=at[1], p99=at[2])


class Counts:
    """The ends of requests. lag: seconds that a token needs from the engine to the client and a request the other way,
    together."""

    def __init__(self, bounds: Bounds, lag: float) -> None:
        self.bounds, self._lag = bounds, lag
        self.gaps = Tally()
        self.ttft, self.tpot, self.e2e = array("d"), array("d"), array("d")
        self.completed = self.failed = self.refused = self.good = 0
        self.prompt_tokens = self.output_tokens = self.seen_tokens = 0
        self.by_tenant: dict[str, array[float]] = {}
        self.last = 0.0

    def ended(self, ask: Ask, stats: RequestStats, over: int) -> None:
        """Count the end of a request. over: how many gaps were longer than the bound."""
        self.last = max(self.last, stats.finished)
        if stats.output_tokens < ask.answer.tokens:
            self.refused += 1
            return
        first = stats.first_token if stats.first_token is not None else stats.finished
        ttft, e2e, later = first - ask.at, stats.finished - ask.at, stats.output_tokens - 1
        tpot = (stats.finished - first) / later if later > 0 else 0.0
        self.ttft.append(ttft)
        self.e2e.append(e2e)
        if later > 0:
            self.tpot.append(tpot)
        self.by_tenant.setdefault(ask.tenant, array("d")).append(ttft)
        self.completed += 1
        self.prompt_tokens += stats.prompt_tokens
        self.output_tokens += stats.output_tokens
        self.seen_tokens += min(ask.seen, stats.prompt_tokens - 1)
        b = self.bounds
        calm = over <= later - math.ceil(0.99 * later)
        self.good += ttft <= b.ttft and tpot <= b.tpot and e2e <= b.e2e and calm


@dataclass(frozen=True, kw_only=True)
class FleetFigures:
    """The figures of a simulated run. Rates are per second of `duration`, which ends with the last answer.

    requests: those that came. failed: those whose replica stopped after their first token.
    refused: those that a policy ended before their answers were whole. goodput: answers a second
    that keep all bounds; None without bounds. hit_rate: share of prompt tokens found in a cache, host_hit_rate of
    those that came from the host's memory, disk_hit_rate of those that were read from a disk, and ideal_hit_rate
    that of one cache for all replicas which forgets nothing. host_loaded_bytes, host_saved_bytes: from there and to
    there. kv_waste: share of the room in running
    requests' blocks that holds no token. replica_seconds: time for which replicas were there, and busy the share of it
    in which steps ran. cost_per_million: of output tokens; None without a price.
    """

    requests: int
    completed: int
    failed: int
    refused: int
    duration: float
    request_rate: float
    output_rate: float
    total_rate: float
    goodput: float | None
    ttft: Spread
    itl: Spread
    tpot: Spread
    e2e: Spread
    hit_rate: float
    host_hit_rate: float
    disk_hit_rate: float
    ideal_hit_rate: float
    host_loaded_bytes: int
    host_saved_bytes: int
    preemptions: int
    kv_waste: float
    steps: int
    replica_seconds: float
    busy: float
    cost_per_million: float | None
    tenants: Mapping[str, Spread]
