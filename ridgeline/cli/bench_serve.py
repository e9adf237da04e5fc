"""`ridgeline bench serve`: load on servers that speak OpenAI's API, which run already or are started for it."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from ridgeline.cli.bench_agents import check_flags, measure, show, workload
from ridgeline.cli.bench_serve_flags import AgentFlags, BodyFlags, ClientFlags, LoadFlags, ReportFlags, ServerFlags
from ridgeline.cli.options import json_object, with_records
from ridgeline.cli.tracked import TrackFlags, tracked
from ridgeline.core.errors import InvalidConfig
from ridgeline.progress import counted
from ridgeline.tracking import UNTRACKED, Tracker

if TYPE_CHECKING:
    from ridgeline_bench.results import Machine
    from ridgeline_bench.serving.campaign import Curve
    from ridgeline_bench.serving.search import Search
    from ridgeline_bench.serving.session import OnProgress, Sending, Session
    from ridgeline_bench.serving.start import Target, Up
    from ridgeline_bench.serving.work import Work

DEFAULT_COUNT = 200
FIRST_RATE = "1"  # of a search, in requests a second


@with_records
def serve(
    *,
    server: ServerFlags,
    load: LoadFlags,
    agents: AgentFlags,
    body: BodyFlags,
    client: ClientFlags,
    report: ReportFlags,
    track: TrackFlags,
) -> None:
    """Measure servers under open-loop load: requests leave at their time, whatever the server does. Exit code 1 if any
    request failed."""
    for package in ("httptools", "msgspec"):
        if importlib.util.find_spec(package) is None:
            raise InvalidConfig(f"this needs {package}, which is not installed; pip install 'ridgeline[serve]'.")
    if body.endpoint not in ("completions", "chat", "generate"):
        raise InvalidConfig(f"--endpoint must be completions, chat or generate, got {body.endpoint!r}.")
    if report.plot is not None and report.plot.suffix not in (".svg", ".png", ".pdf"):
        raise InvalidConfig(f"--plot writes .svg, .png or .pdf, got {str(report.plot)!r}.")
    from ridgeline_bench.serving.campaign import Campaign
    from ridgeline_bench.serving.figures import Slo
    from ridgeline_bench.serving.search import Search
    from ridgeline_bench.serving.session import Sending, parse_rates
    from ridgeline_bench.serving.start import Elsewhere, ended_by_sigterm

    check_flags(agents, load, body, client, report, track)
    ignore_eos = True if body.ignore_eos else None
    fields = {"temperature": body.temperature, "ignore_eos": ignore_eos, **json_object(body.extra, "--extra")}
    if agents.agents:
        _agents(server, load, agents, body, client, report, fields)
        return
    work = _work(load, server.vocab_size, endpoint=body.endpoint)
    if client.search_slo and client.slo:
        raise InvalidConfig("--search-slo is itself the objective that goodput counts; leave --slo out.")
    rates = parse_rates(load.rate or (FIRST_RATE if client.search_slo else ""), work)
    search = Search.parse(client.search_slo, rates)
    sending = Sending(
        rates=rates,
        slo=search.slo if search is not None else Slo.parse(client.slo),
        fields=fields,
        api_key=server.api_key,
        max_concurrency=client.max_concurrency,
        timeout=client.timeout,
        processes=client.client_processes,
        search=search,
    )
    options = {
        **{name: value for name, value in asdict(load).items() if name != "rate"},
        "trace": str(load.trace or ""), "burstiness": str(load.burstiness), "endpoint": body.endpoint,
        "fields": fields, "slo": client.slo or client.search_slo, "max_concurrency": client.max_concurrency,
        "client_processes": client.client_processes,
        **({"dummy": server.dummy} if server.start else {"url": server.url}),
    }  # fmt: skip
    notes = _Notes(report, options, local=bool(server.start), search=sending.search)
    with tracked(track, "bench serve", options, {"model": server.model}) as notes.tracker:
        with ExitStack() as opened:
            targets: Sequence[Target] = [Elsewhere(url=server.url, model=server.model, vocab_size=server.vocab_size)]
            if server.start:
                spare = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="ridgeline-")))
                targets = _starts(server.start, server, spare)
            begin = partial(_begin, work=work, sending=sending)
            campaign = Campaign(
                targets=targets, begin=begin, complain=notes.complain, within=client.within, warmup=client.warmup
            )
            opened.enter_context(ended_by_sigterm())
            progress = opened.enter_context(counted("{task.description}", TimeElapsedColumn()))
            for curve in campaign.run(partial(_watched, progress)):
                notes.take(curve)
        notes.show()
        raise typer.Exit(int(notes.failed))


def _agents(
    server: ServerFlags,
    load: LoadFlags,
    agents: AgentFlags,
    body: BodyFlags,
    client: ClientFlags,
    report: ReportFlags,
    fields: Mapping[str, Any],
) -> None:
    """Measure W6, and leave with exit code 1 if any request failed."""
    from ridgeline_bench.results import gpu, host
    from ridgeline_bench.serving.agents import AgentAsking
    from ridgeline_bench.serving.start import Elsewhere, ended_by_sigterm

    work = workload(agents, load)
    asking = AgentAsking(fields=fields, timeout=client.timeout, api_key=server.api_key)
    with ExitStack() as opened:
        targets: Sequence[Target] = [Elsewhere(url=server.url, model=server.model, vocab_size=server.vocab_size)]
        if server.start:
            spare = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="ridgeline-")))
            targets = _starts(server.start, server, spare)
        opened.enter_context(ended_by_sigterm())
        served = list(measure(targets, work, asking, agents.price_per_hour))
    machine = replace(host(), gpu=gpu()) if server.start else replace(host(), torch="", triton="")
    show(served, report, machine, {**asdict(work), "rate": str(work.rate), "fields": dict(fields)})
    failed = len(served) < len(targets) or any(each.figures.errors for each in served)
    for each in served:
        for kind, count in each.figures.errors.items():
            print(f"ridgeline: {each.label or each.server.engine}: {count} requests failed: {kind}.", file=sys.stderr)
    raise typer.Exit(int(failed))


def _work(load: LoadFlags, vocab_size: int, *, endpoint: str) -> Work:
    """Return the requests that the options describe. Raise InvalidConfig."""
    from ridgeline_bench.serving import trace as traces
    from ridgeline_bench.serving.work import Lengths, Work, prefix

    prefix_tokens, prefix_groups = prefix(load.shared_prefix)
    rows = traces.read(load.trace) if load.trace is not None else ()
    return Work(
        seed=load.seed,
        count=load.num_requests or (0 if load.duration or rows else DEFAULT_COUNT),
        duration=load.duration,
        burstiness=load.burstiness,
        input_len=Lengths.parse(load.input_len, "--input-len"),
        output_len=Lengths.parse(load.output_len, "--output-len"),
        prefix_tokens=prefix_tokens,
        prefix_groups=prefix_groups,
        vocab_size=vocab_size,
        chat=endpoint == "chat",
        text=endpoint == "generate",
        trace=rows,
    )


def _begin(up: Up, until: float, *, work: Work, sending: Sending) -> Session:
    from ridgeline_bench.serving.session import Session

    work = replace(work, vocab_size=work.vocab_size or up.vocab_size)
    return Session.begin(up.url, up.model, work, sending, until)


def _starts(texts: Sequence[str], server: ServerFlags, spare: Path) -> Sequence[Target]:
    """Return the servers to start. `spare` is an empty folder, for a model that has to be completed."""
    from ridgeline.weights.folder import EMBEDDED_MODEL, resolve_model
    from ridgeline_bench.runner import Where
    from ridgeline_bench.serving import vocabulary
    from ridgeline_bench.serving.start import Site, Start

    model, path = server.model, server.peer_path
    folder = resolve_model(model or EMBEDDED_MODEL).resolve()
    name = folder.name if not model or Path(model).exists() else model
    if server.dummy and not vocabulary.has_tokenizer(folder):
        folder = vocabulary.complete(folder, spare)
    site = Site(
        folder=folder,
        name=name,
        vocab_size=vocabulary.vocab_size(folder),
        dummy=server.dummy,
        peer=Where(python=server.peer_python or sys.executable, path=(path.resolve(),) if path else ()),
        logs=server.logs,
        timeout=server.start_timeout,
    )
    return Start.parse(texts, site)


def _watched(bar: Progress, label: str) -> OnProgress:
    """Return the function that draws progress: it gets a rate's name, its requests, and how many of them have ended."""
    waiting: list[Any] = [bar.add_task(f"{label} starts".strip(), total=None)]
    tasks: dict[str, Any] = {}

    def watch(name: str, total: int, ended: int) -> None:
        if waiting:
            bar.remove_task(waiting.pop())
        if name not in tasks:
            tasks[name] = bar.add_task(f"{label} {name}".strip(), total=total)
        bar.update(tasks[name], completed=ended)

    return watch


@dataclass
class _Notes:
    """The notes of a run, written as soon as something is found, because the next rate may be one too many. `local`
    says that the servers run on this machine. Where a search is under way, requests may fail at rates that miss its
    objective."""

    report: ReportFlags
    options: dict[str, Any]
    local: bool
    search: Search | None = None
    tracker: Tracker = UNTRACKED
    failed: bool = False
    curves: dict[str, Curve] = field(default_factory=dict)

    def complain(self, sentence: str) -> None:
        self.failed = True
        print(f"ridgeline: {sentence}", file=sys.stderr)

    def take(self, curve: Curve) -> None:
        if curve.notes:
            print("\n".join(f"ridgeline: {note}" for note in curve.notes), file=sys.stderr)
            self.failed |= curve.died
            return
        new = curve.label not in self.curves
        self.curves[curve.label] = curve
        found = curve.points[-1]
        self.failed |= bool(found.errors) and self.search is None
        for warning in found.warnings:
            print(f"ridgeline: {curve.label}: {warning}", file=sys.stderr)
        self._keep(curve, new)
        if self.report.plot is not None:
            from ridgeline_bench.serving.plot import draw

            names = dict.fromkeys(f"{c.server.engine} {c.server.version}".strip() for c in self.curves.values())
            draw(
                {label: c.points for label, c in self.curves.items()},
                f"{curve.server.model}: {' and '.join(names)}",
                self.report.plot,
            )

    def _machine(self) -> Machine:
        from ridgeline_bench.results import gpu, host

        machine = replace(host(), gpu=gpu()) if self.local else replace(host(), torch="", triton="")
        return replace(machine, commit=self.report.commit, dirty=False) if self.report.commit else machine

    def _keep(self, curve: Curve, new: bool) -> None:
        """Keep the figures of the newest rate. For the tracker, rates are steps."""
        from ridgeline_bench.results import append
        from ridgeline_bench.serving.show import records, start_record

        machine, options = self._machine(), {**self.options, "server": curve.label}
        found, step = list(records(curve.points[-1], curve.server, machine, options)), len(curve.points)
        figures = {record.metric: record.value for record in found} | {"rate": curve.points[-1].rate}
        place = curve.label or curve.server.engine
        self.tracker.metrics(step, {f"{place}/{name}": value for name, value in figures.items()})
        if self.report.out is not None:
            start = [start_record(curve.start, curve.server, machine, options)] if new and curve.start else []
            append(self.report.out, [*start, *found])

    def conclude(self) -> None:
        """Say what the search has found, and write it."""
        if self.search is None:
            return
        from ridgeline_bench.results import append
        from ridgeline_bench.serving.search import Found
        from ridgeline_bench.serving.show import most_records

        for curve in self.curves.values():
            found = Found.of(curve.points, self.search)
            print(f"ridgeline: {curve.label}: {found.sentence(self.options['slo'])}", file=sys.stderr)
            self.failed |= found.best is None
            if self.report.out is not None and found.best is not None:
                options = {**self.options, "server": curve.label, "missing": found.missing}
                append(self.report.out, most_records(found.best, curve.server, self._machine(), options))

    def show(self) -> None:
        from ridgeline_bench.serving import show

        self.conclude()
        if self.report.plot is not None and self.report.plot.is_file():
            self.tracker.artifact(self.report.plot)
        if self.report.as_json:
            print(json.dumps([show.as_json(c.label, c.points, c.server) for c in self.curves.values()]))
            return
        for curve in self.curves.values():
            server = curve.server
            version = f"{server.engine} {server.version}".strip()
            label = "" if curve.label in (version, server.engine) else f" ({curve.label})"
            points = sorted(curve.points, key=lambda p: p.rate) if self.search else curve.points
            Console().print(show.table(points, f"{server.model} on {version}{label}"))
