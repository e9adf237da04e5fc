"""`ridgeline plan --gpus N`: all ways to divide a model over N devices, and which is best for what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.cli.rates import columns
from ridgeline.cli.sizes import basis, print_json
from ridgeline.core.errors import InvalidConfig
from ridgeline.perf.division import Division
from ridgeline.perf.divisions import Candidate, compare, quickest
from ridgeline.perf.links import Links, assumed
from ridgeline.perf.planner import Deployment
from ridgeline.perf.precision import precision

SHOWN = 10


def show_divisions(deployments: Sequence[Deployment], gpus: int, *, as_json: bool, plot: Path | None) -> None:
    """Print the comparison for each kind of device. Raise InvalidConfig if the model fits on none."""
    if plot is not None:
        raise InvalidConfig("--plot draws one plan a device; leave --gpus out.")
    records = []
    for deployment in deployments:
        found = compare(deployment, gpus)
        if not any(each.plan is not None for each in found):
            refused = next((each.refused for each in found if each.division == Division()), found[0].refused)
            raise InvalidConfig(f"no division of {gpus} devices works; undivided, {refused}")
        if as_json:
            records.append(_record(deployment, gpus, found))
        else:
            _print(deployment, gpus, found)
    if as_json:
        print_json(records)


def _print(deployment: Deployment, gpus: int, found: list[Candidate]) -> None:
    fitting, console = [each for each in found if each.plan is not None], Console()
    quick = quickest(found)
    print(f"{gpus} x {basis(deployment.hardware, precision(deployment.dtype))}")
    print(f"links {_links(deployment).source}; requests of {deployment.input:,} + {deployment.output:,} tokens")
    shown = fitting[:SHOWN]
    shown += [each for each in fitting if each not in shown and (each is quick or _on_one_axis(each))]
    console.print(_table(shown))
    print("GB: weights of a device. room: requests that fit. TTFT, step: of one request alone, ms")
    if fitting[0].best is not None:
        print(f"most tokens: {fitting[0].name} ({fitting[0].why})")
    if quick is not None:
        print(f"one request alone: {quick.name}")
    if left := len(fitting) - len(shown):
        print(f"{left} others fit, with fewer tokens a second")
    for reason, count in Counter(each.refused.split(";")[0] for each in found if each.plan is None).items():
        console.print(f"{count} refused: {reason}", highlight=False, soft_wrap=True)


def _on_one_axis(candidate: Candidate) -> bool:
    """Return True for a division of all devices along one axis alone, which people ask about first."""
    return candidate.replicas == 1 and sum(size > 1 for size in vars(candidate.division).values()) == 1


def _links(deployment: Deployment) -> Links:
    return deployment.links or assumed(deployment.hardware)


def _table(shown: Sequence[Candidate]) -> Table:
    table = columns(("division",), ("GB", "room", "batch", "step ms", "tok/s", "TTFT", "step"))
    table.add_column("a step, beside computing")
    for each in shown:
        assert each.plan is not None
        assert each.alone is not None
        best = each.best
        groups = each.replicas * each.division.groups
        batch = "" if best is None else f"{groups * best.batch:,}"
        step = "" if best is None else f"{1e3 * best.step:.2f}"
        table.add_row(
            each.name,
            f"{each.plan.weights / 1e9:.1f}",
            f"{groups * each.plan.max_requests:,}",
            batch,
            step,
            f"{each.tokens_per_second:,.0f}",
            f"{1e3 * each.alone.ttft:.1f}",
            f"{1e3 * each.alone.step:.2f}",
            each.why,
        )
    return table


def _record(deployment: Deployment, gpus: int, found: list[Candidate]) -> dict[str, Any]:
    quick = quickest(found)
    return {
        "hardware": deployment.hardware.name,
        "gpus": gpus,
        "links": _links(deployment).source,
        "quickest": vars(quick.division) if quick is not None else None,
        "divisions": [
            {
                **vars(each.division),
                "replicas": each.replicas,
                "refused": each.refused or None,
                "weight_bytes": each.plan.weights if each.plan else None,
                "tokens_per_second": each.tokens_per_second,
                "best": asdict(each.best) if each.best else None,
                "alone": asdict(each.alone) if each.alone else None,
                "why": each.why,
            }
            for each in found
        ],
    }
