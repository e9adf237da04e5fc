"""Simulated figures in the form of measured ones, for the same pictures."""

from __future__ import annotations

from ridgeline.simulation.figures import FleetFigures, Spread
from ridgeline_bench.serving import figures


def point(rate: float, found: FleetFigures) -> figures.Point:
    """Return the figures of a run at a rate, as `bench serve` would have them."""
    failed = {"replica stopped": found.failed} if found.failed else {}
    return figures.Point(
        rate=rate,
        num_requests=found.requests,
        num_completed=found.completed,
        errors=failed,
        examples={name: name for name in failed},
        duration=found.duration,
        offered=rate,
        request_rate=found.request_rate,
        output_rate=found.output_rate,
        total_rate=found.total_rate,
        goodput=found.goodput,
        latencies={name: _spread(getattr(found, name)) for name in figures.MEASURES},
        lateness=figures.Spread(0.0, 0.0, 0.0, 0.0, ()),
        peak=0,
        cached=found.hit_rate,
        busy=0.0,
        exact=True,
    )


def _spread(found: Spread) -> figures.Spread:
    return figures.Spread(found.mean, found.p50, found.p90, found.p99, ())
