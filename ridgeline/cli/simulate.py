"""`ridgeline simulate`: run a fleet of replicas on a virtual clock, without a device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from ridgeline.cli.options import with_records
from ridgeline.cli.rates import Gpu, Json, Model, RateFlags
from ridgeline.cli.simulate_flags import EngineFlags, FleetFlags, TrafficFlags
from ridgeline.cli.sizes import print_json, read_config, read_hardware, read_precision
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.policies import PolicySettings
from ridgeline.simulation.figures import Bounds, FleetFigures
from ridgeline.simulation.fleet import Autoscale, Fleet, FleetSettings, ReplicaFailure
from ridgeline.simulation.setup import Settings, Setup
from ridgeline.simulation.traffic import Listed, Traffic

MEASURES = ("ttft", "itl", "tpot", "e2e")
LEAST_RATE = 1e-9  # requests a second
MOST_REQUESTS = 100_000_000
USUAL = 1000  # requests of a run, unless the user says otherwise


class Run(NamedTuple):
    policy: str
    rate: float
    figures: FleetFigures


@with_records
def simulate(
    model: Model,
    gpu: Gpu,
    *,
    traffic: TrafficFlags,
    fleet: FleetFlags,
    engine: EngineFlags,
    rates: RateFlags,
    slo: Annotated[str, typer.Option(help="ttft=200,itl=20,tpot=…,e2e=… in ms: goodput counts what meets all.")] = "",
    plot: Annotated[
        Path | None, typer.Option(help="Draw the runs into this file (.svg; .png needs matplotlib).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate a deployment: the engine's own scheduler, cache and policies, on a virtual clock."""
    from ridgeline_bench.serving.figures import Slo
    from ridgeline_bench.serving.plot import check

    if plot is not None:
        check(plot)
    bounds = Bounds(**{name: ms / 1e3 for name, ms in Slo.parse(slo).bounds.items()})
    config, hardware = read_config(model), read_hardware(gpu, rates.datasheet)
    exact = read_precision(rates.dtype, model, config)
    plan = _fleet(fleet)
    runs = []
    for policy in engine.policy.split(","):
        setup = Setup(config.spec, hardware, exact, _settings(engine, policy, bounds), rates.kv_dtype)
        for rate in _rates(traffic):
            runs.append(Run(policy, rate, Fleet(setup, plan, _traffic(traffic, rate), bounds).run()))
    if as_json:
        print_json({"model": model, "gpu": hardware.name, "runs": [_record(run) for run in runs]})
    else:
        Console(width=max(Console().width, 30 + 34 * len(runs))).print(_table(runs))
    if plot is not None:
        _draw(runs, f"{model} on {plan.replicas} x {hardware.name}, simulated", plot)


def _rates(flags: TrafficFlags) -> list[float]:
    if flags.trace is not None:
        return [0.0]
    try:
        found = [float(each) for each in flags.rate.split(",")]
    except ValueError:
        raise InvalidConfig(f"--rate needs numbers such as 1,2,4 or inf, got {flags.rate!r}.") from None
    if any(not rate >= LEAST_RATE for rate in found):
        raise InvalidConfig(f"--rate must be at least {LEAST_RATE:g}, got {flags.rate!r}.")
    asked: list[float] = [flags.requests] if flags.requests else []
    asked += [flags.duration * max(found)] if flags.duration and max(found) < math.inf else []
    if asked and not min(asked) <= MOST_REQUESTS:
        raise InvalidConfig(
            f"a run has at most {MOST_REQUESTS:,} requests, and these are {min(asked):.3g}; lower --requests, or "
            "--duration or --rate."
        )
    return found


def _settings(flags: EngineFlags, policy: str, bounds: Bounds) -> Settings:
    """Return the settings of each replica. The bounds of --slo are the objectives of the slo policy."""
    usual = PolicySettings()
    objectives = PolicySettings(
        slo_ttft=bounds.ttft if bounds.ttft < math.inf else usual.slo_ttft,
        slo_itl=bounds.itl if bounds.itl < math.inf else usual.slo_itl,
    )
    return Settings(
        **{**asdict(flags), "policy": policy.strip(), "lag": flags.lag / 1e3, "objectives": objectives},
    )


def _fleet(flags: FleetFlags) -> FleetSettings:
    split = flags.prefill_replicas, flags.decode_replicas
    if any(split) and not all(split):
        raise InvalidConfig("--prefill-replicas and --decode-replicas go together; give both, or none.")
    if any(split) and flags.replicas != 1:
        raise InvalidConfig("--replicas is the sum of --prefill-replicas and --decode-replicas; leave it out.")
    return FleetSettings(
        replicas=sum(split) or flags.replicas,
        prefill=flags.prefill_replicas,
        handover_rate=1e9 * flags.handover_rate,
        routing=flags.routing,
        failures=[_failure(text) for text in flags.fail or ()],
        autoscale=_autoscale(flags.autoscale) if flags.autoscale else None,
        price=flags.price_per_hour,
    )


def _failure(text: str) -> ReplicaFailure:
    replica, _, rest = text.partition("@")
    at, _, away = rest.partition(":")
    try:
        return ReplicaFailure(replica=int(replica), at=float(at), away=float(away))
    except ValueError:
        raise InvalidConfig(f"--fail needs REPLICA@SECONDS:AWAY, such as 0@10:30, got {text!r}.") from None


def _autoscale(text: str) -> Autoscale:
    least, _, rest = text.partition(":")
    requests, _, start = rest.partition(":")
    try:
        return Autoscale(least=int(least), requests=int(requests), start=float(start or 30))
    except ValueError:
        raise InvalidConfig(f"--autoscale needs LEAST:REQUESTS[:START], such as 1:64:30, got {text!r}.") from None


def _traffic(flags: TrafficFlags, rate: float) -> Traffic:
    from ridgeline_bench.serving import asks, traces
    from ridgeline_bench.serving.sessions import Agents
    from ridgeline_bench.serving.work import Lengths, Work, prefix

    if not 0 <= flags.time_scale < math.inf:
        raise InvalidConfig(f"--time-scale must be a number from 0, got {flags.time_scale!r}.")
    if flags.trace is not None:
        if flags.agents:
            raise InvalidConfig("--trace and --agents are two workloads; leave one of them out.")
        return Listed(traces.asks(flags.trace, flags.time_scale, flags.requests))
    if flags.agents:
        sizes: dict[str, Any] = {"sessions": flags.agents, "turns": flags.turns, "rate": rate, "seed": flags.seed}
        return Agents(**sizes, **Agents.sizes(flags.agent_sizes), time_scale=flags.time_scale)
    if not flags.burstiness > 0:
        raise InvalidConfig(f"--burstiness must be above 0, got {flags.burstiness!r}.")
    shared, groups = prefix(flags.shared_prefix)
    work = Work(
        seed=flags.seed,
        count=flags.requests or (0 if flags.duration and rate < math.inf else USUAL),
        duration=flags.duration,
        burstiness=flags.burstiness,
        input_len=Lengths.parse(flags.input_len, "--input-len"),
        output_len=Lengths.parse(flags.output_len, "--output-len"),
        prefix_tokens=shared,
        prefix_groups=groups,
    )
    return Listed(asks.asks(work, rate, asks.tenants(flags.tenants)))


def _record(run: Run) -> dict[str, Any]:
    rate = "inf" if math.isinf(run.rate) else run.rate
    return {"policy": run.policy, "rate": rate, **asdict(run.figures)}


def _table(runs: list[Run]) -> Table:
    """Return one column a run, with times as p50 / p90 / p99."""
    found = Table("", *(f"{run.policy} {_rate(run.rate)}" for run in runs))
    for name, cells in _rows([run.figures for run in runs]):
        found.add_row(name, *cells)
    return found


def _rate(rate: float) -> str:
    return "trace" if rate == 0 else "at once" if math.isinf(rate) else f"{rate:g}/s"


def _rows(runs: list[FleetFigures]) -> Iterator[tuple[str, list[str]]]:
    yield "completed", [f"{f.completed} of {f.requests}" for f in runs]
    if any(f.refused + f.failed for f in runs):
        yield "refused, failed", [f"{f.refused}, {f.failed}" for f in runs]
    yield "requests/s", [f"{f.request_rate:.2f}" for f in runs]
    if any(f.goodput is not None for f in runs):
        yield "within the SLO/s", [f"{f.goodput or 0.0:.2f}" for f in runs]
    yield "output tokens/s", [f"{f.output_rate:,.0f}" for f in runs]
    for name in MEASURES:
        spreads = [getattr(f, name) for f in runs]
        yield f"{name}, ms", [f"{s.p50:,.4g} / {s.p90:,.4g} / {s.p99:,.4g}" for s in spreads]
    for tenant in sorted({name for f in runs for name in f.tenants} - {""}):
        own = [f.tenants.get(tenant) for f in runs]
        yield f"ttft of {tenant}, ms", [f"{s.p50:,.4g} / {s.p90:,.4g} / {s.p99:,.4g}" if s else "" for s in own]
    yield "cached prompt, of ideal", [f"{100 * f.hit_rate:.1f} of {100 * f.ideal_hit_rate:.1f} %" for f in runs]
    if any(f.host_saved_bytes for f in runs):
        yield "of these in the host's memory", [f"{100 * f.host_hit_rate:.1f} %" for f in runs]
        if any(f.disk_hit_rate for f in runs):
            yield "of these read from the disk", [f"{100 * f.disk_hit_rate:.1f} %" for f in runs]
        moved = [(f.host_loaded_bytes, f.host_saved_bytes) for f in runs]
        yield "GB from there, to there", [f"{loaded / 1e9:.1f}, {saved / 1e9:.1f}" for loaded, saved in moved]
    yield "preemptions", [f"{f.preemptions}" for f in runs]
    yield "KV waste", [f"{100 * f.kv_waste:.1f} %" for f in runs]
    yield "busy", [f"{100 * f.busy:.0f} %" for f in runs]
    if any(f.cost_per_million is not None for f in runs):
        yield "per million tokens", [f"{f.cost_per_million or 0.0:.3g}" for f in runs]


def _draw(runs: list[Run], title: str, path: Path) -> None:
    from ridgeline_bench.serving.plot import draw
    from ridgeline_bench.serving.simulated import point

    by_policy: dict[str, list[Any]] = {}
    for run in runs:
        by_policy.setdefault(run.policy, []).append(point(run.rate, run.figures))
    draw(by_policy, title, path)
