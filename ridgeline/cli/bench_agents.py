"""`ridgeline bench serve --agents`: sessions of agents (W6) against one server after another."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table

from ridgeline.cli.bench_serve_flags import AgentFlags, BodyFlags, ClientFlags, LoadFlags, ReportFlags
from ridgeline.cli.tracked import TrackFlags
from ridgeline.core.errors import InvalidConfig, RidgelineError

if TYPE_CHECKING:
    from ridgeline_bench.results import Machine, Record
    from ridgeline_bench.serving.agents import AgentAsking, AgentFigures
    from ridgeline_bench.serving.server import Server
    from ridgeline_bench.serving.sessions import Agents
    from ridgeline_bench.serving.start import Target

OF_OTHERS = {  # options of other workloads, and of what is not done for agents
    *("trace", "shared_prefix", "duration", "num_requests", "burstiness", "input_len", "output_len", "endpoint"),
    *("slo", "search_slo", "max_concurrency", "within", "warmup", "client_processes", "plot", "track", "track_to"),
}
MOST_LINES = 12  # of turns in a table


class ServedAgents(NamedTuple):
    """The figures of one server. label: what it is called ("": by itself)."""

    label: str
    server: Server
    figures: AgentFigures


def check_flags(flags: AgentFlags, *others: LoadFlags | BodyFlags | ClientFlags | ReportFlags | TrackFlags) -> None:
    """Raise InvalidConfig for options that mean nothing with --agents, or without it."""
    agents = bool(flags.agents)
    ignored = [name for group in others for name in _given(group) if name in OF_OTHERS] if agents else _given(flags)
    if ignored:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in ignored)
        told = f"--agents takes no {named}" if agents else f"{named} needs --agents"
        raise InvalidConfig(f"{told}; leave {'it' if len(ignored) == 1 else 'them'} out.")


def _given(flags: object) -> list[str]:
    """Return the options that have not their default values."""
    assert is_dataclass(flags)
    return [each.name for each in fields(flags) if getattr(flags, each.name) != each.default]


def workload(flags: AgentFlags, load: LoadFlags) -> Agents:
    """Return the sessions that the options describe. Raise InvalidConfig."""
    from ridgeline_bench.serving.sessions import Agents

    try:
        rate = float(load.rate or "inf")
    except ValueError:
        raise InvalidConfig(f"--agents needs one --rate of sessions a second, or inf; got {load.rate!r}.") from None
    sizes: dict[str, Any] = Agents.sizes(flags.agent_sizes)
    return Agents(
        sessions=flags.agents,
        turns=flags.turns,
        rate=rate,
        time_scale=flags.time_scale,
        seed=load.seed,
        **sizes,
    )


def measure(
    targets: Sequence[Target], agents: Agents, asking: AgentAsking, price: float | None
) -> Iterator[ServedAgents]:
    """Yield the figures of each server. One that fails is named on standard error, if there are others."""
    from ridgeline_bench.serving.agents import figures, play
    from ridgeline_bench.serving.server import Server

    headers = {"Authorization": f"Bearer {asking.api_key}"} if asking.api_key else {}
    for target in targets:
        try:
            with target.up(math.inf) as up:
                server = Server.ask(up.url, headers, up.model)
                if up.vocab_size:
                    server = Server(**{**asdict(server), "vocab_size": up.vocab_size})
                found = figures(agents, asyncio.run(play(agents, server, asking)), price)
        except RidgelineError as error:
            if len(targets) == 1:
                raise
            print(f"ridgeline: {error}", file=sys.stderr)
            continue
        yield ServedAgents(target.label, server, found)


def show(served: Sequence[ServedAgents], report: ReportFlags, machine: Machine, options: Mapping[str, Any]) -> None:
    """Print what was found, and append it to --out."""
    from ridgeline_bench.results import append

    if report.out is not None:
        for each in served:
            append(report.out, _records(each, machine, options))
    if report.as_json:
        print(json.dumps([_as_json(each) for each in served]))
        return
    Console(width=max(Console().width, 40 + 30 * len(served))).print(_table(served))


def _as_json(each: ServedAgents) -> dict[str, Any]:
    found = asdict(each.figures)
    for name in ("session_time", "ttft"):
        spread = getattr(each.figures, name)
        found[name] = {"mean": spread.mean, "p50": spread.p50, "p90": spread.p90, "p99": spread.p99}
    return {"server": each.label, "engine": each.server.engine, "model": each.server.model, **found}


def _table(served: Sequence[ServedAgents]) -> Table:
    names = [each.label or f"{each.server.engine} {each.server.version}".strip() for each in served]
    table, found = (
        Table(f"W6 of {served[0].server.model}" if served else "W6", *names),
        [each.figures for each in served],
    )
    table.add_row("sessions completed", *(f"{f.completed} of {f.sessions}" for f in found))
    table.add_row("requests, failed", *(f"{f.requests}, {sum(f.errors.values())}" for f in found))
    for name, text in (("session_time", "session, s: p50 / p90 / p99"), ("ttft", "first token, s: p50 / p90 / p99")):
        spreads = [getattr(f, name) for f in found]
        table.add_row(text, *(f"{s.p50 / 1e3:,.4g} / {s.p90 / 1e3:,.4g} / {s.p99 / 1e3:,.4g}" for s in spreads))
    turns = sorted({turn for f in found for turn in f.ttft_by_turn})
    for turn in turns[:: -(-len(turns) // MOST_LINES)] if turns else ():
        medians = (f.ttft_by_turn.get(turn) for f in found)
        table.add_row(
            f"first token of turn {turn + 1}, s: p50", *("" if t is None else f"{t / 1e3:,.4g}" for t in medians)
        )
    table.add_row(
        "cached prompt, of ideal", *(f"{100 * f.hit_rate:.1f} of {100 * f.ideal_hit_rate:.1f} %" for f in found)
    )
    table.add_row("output tokens/s", *(f"{f.output_rate:,.1f}" for f in found))
    table.add_row("prompt and output tokens/s", *(f"{f.total_rate:,.0f}" for f in found))
    if any(f.cost_per_session is not None for f in found):
        table.add_row("price of a session", *(f"{f.cost_per_session or 0.0:.3g}" for f in found))
    return table


def _records(each: ServedAgents, machine: Machine, options: Mapping[str, Any]) -> Iterator[Record]:
    from ridgeline_bench.serving.show import recorder

    f = each.figures
    made = recorder(each.server, machine, {**options, "server": each.label})
    metrics = [
        ("session p50", f.session_time.p50, "ms", "lower", f.session_time.samples),
        ("session p99", f.session_time.p99, "ms", "lower", ()),
        ("ttft p50", f.ttft.p50, "ms", "lower", f.ttft.samples),
        ("ttft p99", f.ttft.p99, "ms", "lower", ()),
        *((f"ttft of turn {turn + 1} p50", value, "ms", "lower", ()) for turn, value in f.ttft_by_turn.items()),
        ("cached", 100 * f.hit_rate, "%", "higher", ()),
        ("ideal", 100 * f.ideal_hit_rate, "%", "higher", ()),
        ("output", f.output_rate, "tokens/s", "higher", ()),
        ("failed", sum(f.errors.values()), "requests", "lower", ()),
    ]
    if f.cost_per_session is not None:
        metrics.append(("session price", f.cost_per_session, "price", "lower", ()))
    for metric, value, unit, better, samples in metrics:
        yield made(
            workload=f"serve W6 {f.sessions} sessions",
            metric=metric,
            value=value,
            unit=unit,
            better=better,
            samples=samples,
        )
