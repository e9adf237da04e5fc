"""`ridgeline plan --trace`: the flags with which a server of a load should start, found by simulation."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.cli.sizes import print_json
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.policies import PolicySettings
from ridgeline.perf.planner import Deployment
from ridgeline.simulation.figures import Bounds, FleetFigures
from ridgeline.simulation.fleet import Fleet, FleetSettings
from ridgeline.simulation.search import SHARE, SettingSearch, SettingTrial
from ridgeline.simulation.setup import Settings, Setup
from ridgeline.simulation.traffic import Listed

MOST_REQUESTS, MOST_REPLICAS = 1000, 64
FLAGS = {
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "itl_target": "--itl-target",
    "policy": "--scheduling-policy",
}


def show_settings(model: str, deployments: list[Deployment], trace: Path, slo: str, *, as_json: bool) -> None:
    """Print the flags for each device. Raise InvalidConfig for bounds or a trace that say nothing."""
    from ridgeline_bench.serving.figures import Slo

    bounds = Bounds(**{name: ms / 1e3 for name, ms in Slo.parse(slo).bounds.items()})
    if bounds == Bounds():
        raise InvalidConfig("--trace looks for settings that keep bounds; name these with --slo ttft=500,itl=50.")
    records = []
    for deployment in deployments:
        search = SettingSearch(_simulate(deployment, trace, bounds), _choices(bounds), MOST_REPLICAS)
        best = search.best(_settings(bounds, deployment))
        if as_json:
            trials = [_record(each) for each in search.trials]
            records.append({"hardware": deployment.hardware.name, **_record(best), "trials": trials})
        else:
            _print(model, deployment, search.trials, best)
    if as_json:
        print_json(records)


def flags_of(settings: Settings, bounds: PolicySettings) -> list[str]:
    """Return the flags of `ridgeline serve` for settings other than its own."""
    found = []
    for name, flag in FLAGS.items():
        value = getattr(settings, name)
        if value not in (None, "fcfs"):
            found.append(f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {value}")
    if settings.kv_offloading_size:
        found.append(f"--kv-offloading-size {settings.kv_offloading_size:g}")
    if settings.policy == "slo":
        found.append(f"--slo-ttft-ms {1e3 * bounds.slo_ttft:g}")
        found += [f"--slo-itl-ms {1e3 * bounds.slo_itl:g}"] if bounds.slo_itl else []
    return found


def _settings(bounds: Bounds, deployment: Deployment) -> Settings:
    usual = PolicySettings()
    objectives = PolicySettings(
        slo_ttft=bounds.ttft if bounds.ttft < math.inf else usual.slo_ttft,
        slo_itl=bounds.itl if bounds.itl < math.inf else usual.slo_itl,
    )
    size, share = deployment.kv_offloading_size, deployment.utilization
    return Settings(objectives=objectives, utilization=share, kv_offloading_size=size)


def _choices(bounds: Bounds) -> dict[str, list[Any]]:
    itl = [1e3 * bounds.itl] if bounds.itl < math.inf else []
    return {
        "itl_target": [*itl, 0.0],
        "max_num_batched_tokens": [2048, 4096, 8192, 16384],
        "max_num_seqs": [64, 128, 512],
        "policy": ["slo", "srpt"],
    }


def _simulate(deployment: Deployment, trace: Path, bounds: Bounds) -> Any:
    from ridgeline_bench.serving import traces

    def simulate(settings: Settings, replicas: int) -> FleetFigures:
        setup = Setup(deployment.model, deployment.hardware, deployment.dtype, settings, deployment.kv_dtype)
        traffic = Listed(traces.asks(trace, 1.0, MOST_REQUESTS))
        price = deployment.price_per_hour
        found = Fleet(setup, FleetSettings(replicas=replicas, price=price), traffic, bounds).run()
        if not found.requests:
            raise InvalidConfig(f"the trace {str(trace)!r} has no requests; give one that has some.")
        return found

    return simulate


def _record(trial: SettingTrial) -> dict[str, Any]:
    return {
        "replicas": trial.replicas,
        "changed": trial.changed,
        "flags": flags_of(trial.settings, trial.settings.objectives),
        "within": trial.share,
        "figures": asdict(trial.figures),
    }


def _print(model: str, deployment: Deployment, trials: list[SettingTrial], best: SettingTrial) -> None:
    shown = Table("replicas", "tried", "within the SLO", "ttft p50, p99 ms", "itl p99 ms", "output tokens/s")
    for each in trials:
        f = each.figures
        within, ttft = f"{100 * each.share:.1f} %", f"{f.ttft.p50:,.4g}, {f.ttft.p99:,.4g}"
        mark = "> " if each is best else ""
        tried = each.changed.replace("_", "-") or " ".join(flags_of(each.settings, each.settings.objectives))
        shown.add_row(f"{mark}{each.replicas}", tried, within, ttft, f"{f.itl.p99:,.4g}", f"{f.output_rate:,.0f}")
    print(f"{deployment.hardware.name}: {trials[0].figures.requests} requests of the trace, simulated")
    Console().print(shown)
    if best.share < SHARE:
        print(
            f"no settings keep the bounds for {100 * SHARE:g} % of the requests on {best.replicas} replicas; the best:"
        )
    flags = " ".join(flags_of(best.settings, best.settings.objectives))
    print(f"{best.replicas} x ridgeline serve {model} {flags}".rstrip())
    if best.replicas > 1:
        print("and before them: ridgeline route --policy prefix")
