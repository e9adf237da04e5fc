"""Points as a table, as JSON and as result records."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich.table import Table

from ridgeline_bench.results import Machine, Record
from ridgeline_bench.serving.figures import MEASURES, PERCENTS, Point, Spread
from ridgeline_bench.serving.server import Server


def table(points: Sequence[Point], title: str) -> Table:
    """Return one column per rate, with latencies of completed requests as p50 / p90 / p99."""
    found = Table("rate", *(p.name for p in points), title=title)

    def row(name: str, cell: Callable[[Point], str]) -> None:
        found.add_row(name, *map(cell, points))

    row("completed", lambda p: f"{p.num_completed} of {p.num_requests}")
    row("requests/s", lambda p: f"{p.request_rate:.2f}")
    if any(p.goodput is not None for p in points):
        row("within the SLO/s", lambda p: f"{p.goodput or 0.0:.2f}")
    row("output tokens/s", lambda p: f"{p.output_rate:,.0f}")
    for name in MEASURES:
        row(f"{name}, ms", lambda p, name=name: " / ".join(map(_short, p.latencies[name][1:4])))  # type: ignore[misc]
    row("most at once", lambda p: str(p.peak))
    row("cached prompt", lambda p: f"{100 * p.cached:.0f} %")
    row("client late, ms", lambda p: " / ".join(map(_short, p.lateness[1:4])))
    row("client busy", lambda p: f"{100 * p.busy:.0f} %")
    return found


def _short(milliseconds: float) -> str:
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def as_json(label: str, points: Sequence[Point], server: Server) -> dict[str, Any]:
    """Return the same for programs. An infinite rate is "inf"."""
    return {
        "label": label,
        "url": server.url,
        "model": server.model,
        "engine": server.engine,
        "version": server.version,
        "points": [_point(p) for p in points],
    }


def _point(p: Point) -> dict[str, Any]:
    spreads = {
        f"{name}_ms": {"mean": s.mean, "p50": s.p50, "p90": s.p90, "p99": s.p99, "samples": len(s.samples)}
        for name, s in {**p.latencies, "lateness": p.lateness}.items()
    }
    return {
        "rate": "inf" if math.isinf(p.rate) else p.rate,
        "requests": p.num_requests,
        "completed": p.num_completed,
        "errors": dict(p.errors),
        "duration_s": p.duration,
        "offered_per_s": p.offered,
        "requests_per_s": p.request_rate,
        "goodput_per_s": p.goodput,
        "output_tokens_per_s": p.output_rate,
        "total_tokens_per_s": p.total_rate,
        "peak_concurrency": p.peak,
        "cached_share": p.cached,
        "client_busy": p.busy,
        "exact_token_counts": p.exact,
        "warnings": list(p.warnings),
        **spreads,
    }


def recorder(server: Server, machine: Machine, options: Mapping[str, Any]) -> Callable[..., Record]:
    """Return a function that makes records of a server's figures."""
    version = server.version or "unknown"
    return partial(
        Record, engine=server.engine, version=version, model=server.model, machine=machine, options=dict(options)
    )


def start_record(seconds: float, server: Server, machine: Machine, options: dict[str, Any]) -> Record:
    """Return the record of the time from the process' start to the first request it would have taken."""
    return recorder(server, machine, options)(
        workload="startup",
        metric="serving",
        value=seconds,
        unit="s",
        samples=(seconds,),
    )


def most_records(p: Point, server: Server, machine: Machine, options: dict[str, Any]) -> Iterator[Record]:
    """Yield the most load that meets an objective, which a search has found."""
    work, record = f"{options['input_len']}>{options['output_len']}", recorder(server, machine, options)
    for metric, value, unit in (("requests", p.rate, "requests/s"), ("output", p.output_rate, "tokens/s")):
        yield record(
            workload=f"serve {options['endpoint']} {work} most within {options['slo']}",
            metric=metric,
            value=value,
            unit=unit,
            better="higher",
            samples=(value,),
        )


def records(p: Point, server: Server, machine: Machine, options: dict[str, Any]) -> Iterator[Record]:
    """Yield the figures for the results' file. The workload's name includes what was asked for, so unlike work is not
    compared."""
    work = options["trace"] or f"{options['input_len']}>{options['output_len']}"
    shared = f" prefix {options['shared_prefix']}" if options["shared_prefix"] else ""
    made = partial(recorder(server, machine, options), workload=f"serve {options['endpoint']} {work}{shared} {p.name}")

    def record(metric: str, value: float, unit: str, better: str, samples: tuple[float, ...] = ()) -> Record:
        return made(metric=metric, value=value, unit=unit, better=better, samples=samples)

    yield record("requests", p.request_rate, "requests/s", "higher")
    yield record("output", p.output_rate, "tokens/s", "higher")
    if p.goodput is not None:
        yield record("goodput", p.goodput, "requests/s", "higher")
    yield record("failed", p.num_requests - p.num_completed, "requests", "lower")
    for name in MEASURES:
        spread = p.latencies[name]
        for percent, value in zip(PERCENTS, spread[1:4], strict=True):
            # an itl has as many samples as there are tokens, so the requests' tpot stand for them
            kept = spread.samples if percent == 50 and name != "itl" else ()
            yield record(f"{name} p{percent}", value, "ms", "lower", kept)


def points_of(records: Iterable[Record]) -> list[Point]:
    """Return the points of stored records of one server, with what a picture shows of them."""
    found: dict[str, dict[str, float]] = {}
    for record in records:
        if record.workload.startswith("serve "):
            found.setdefault(record.workload.rpartition(" ")[2], {})[record.metric] = record.value
    return [_stored_point(float(name.removesuffix("/s")), values) for name, values in found.items()]


def _stored_point(rate: float, values: Mapping[str, float]) -> Point:
    def spread(name: str) -> Spread:
        p50, p90, p99 = (values[f"{name} p{percent}"] for percent in PERCENTS)
        return Spread(0.0, p50, p90, p99, ())

    return Point(
        rate=rate,
        num_requests=0,
        num_completed=0,
        errors={},
        examples={},
        duration=0.0,
        offered=rate,
        request_rate=values["requests"],
        output_rate=values["output"],
        total_rate=0.0,
        goodput=values.get("goodput"),
        latencies={name: spread(name) for name in MEASURES},
        lateness=Spread.of(()),
        peak=0,
        cached=0.0,
        busy=0.0,
        exact=True,
    )
