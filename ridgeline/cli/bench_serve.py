"""`ridgeline bench serve`: load on servers that speak OpenAI's API, which run already or are started for it."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ridgeline.cli.options import json_object
from ridgeline.core.errors import InvalidConfig

if TYPE_CHECKING:
    from ridgeline_bench.serving.campaign import Curve
    from ridgeline_bench.serving.session import OnProgress, Session
    from ridgeline_bench.serving.start import Target, Up

DEFAULT_COUNT = 200


def serve(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    start: Annotated[
        list[str] | None,
        typer.Option(
            help="Start a server here and measure it: ridgeline or vllm, followed by its flags; several run in turn."
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Default: the first of /v1/models. With --start: folder or hub id (default: embedded).")
    ] = "",
    dummy: Annotated[
        bool, typer.Option("--dummy", help="With --start: random weights; config.json is enough.")
    ] = False,
    peer_path: Annotated[Path | None, typer.Option(help="Folder put first on vLLM's module path.")] = None,
    peer_python: Annotated[str, typer.Option(help="vLLM's Python, if it lives in its own environment.")] = "",
    logs: Annotated[Path | None, typer.Option(help="Folder for the logs of servers started here.")] = None,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds that a server started here may need.")] = 600.0,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="API key, sent as a bearer token.")] = "",
    rate: Annotated[str, typer.Option(help="Requests a second; 1,2,4 for a curve; inf: all at once.")] = "",
    burstiness: Annotated[
        float, typer.Option(help="Burstiness of arrivals: 1 Poisson, below burstier, inf even.")
    ] = 1.0,
    num_requests: Annotated[
        int, typer.Option(min=0, help="Requests of each rate (default: 200, or as many as --duration takes).")
    ] = 0,
    duration: Annotated[float, typer.Option(min=0, help="Seconds in which requests of a rate leave.")] = 0.0,
    input_len: Annotated[str, typer.Option(help="Tokens: N, LOW:HIGH, or MEAN,DEVIATION[,MAX] (lognormal).")] = "512",
    output_len: Annotated[str, typer.Option(help="Tokens, in the same forms.")] = "128",
    trace: Annotated[Path | None, typer.Option(help="JSON lines: timestamp, lengths or prompt of requests.")] = None,
    shared_prefix: Annotated[
        str, typer.Option(help="TOKENS[,GROUPS]: tokens that requests begin with, in groups that share them.")
    ] = "",
    vocab_size: Annotated[
        int, typer.Option(min=0, help="Random ids are below this (default: what the server says).")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of every draw.")] = 0,
    endpoint: Annotated[str, typer.Option(help="completions (token ids) or chat (words).")] = "completions",
    temperature: Annotated[float, typer.Option(min=0, help="Temperature of sampling.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Answers have exactly the length asked for.")] = True,
    extra: Annotated[str, typer.Option(help="JSON object of further body fields; null removes one of ours.")] = "",
    slo: Annotated[str, typer.Option(help="ttft=200,itl=20,tpot=…,e2e=… in ms: goodput counts what meets all.")] = "",
    max_concurrency: Annotated[int, typer.Option(min=0, help="Requests open at once; 0: as many as there are.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds a request may take.")] = 600.0,
    within: Annotated[
        float, typer.Option(min=0, help="Seconds for the whole run; rates that do not fit are left out (0: no limit).")
    ] = 0.0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests sent first, one by one, and not counted.")] = 2,
    client_processes: Annotated[int, typer.Option(min=1, help="Processes that send requests.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Results are appended to this file, rate by rate.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture of the curves (.svg; .png needs matplotlib).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
    commit: Annotated[str, typer.Option(help="Recorded with the results; default: what git says.")] = "",
) -> None:
    """Measure servers under open-loop load: requests leave at their time, whatever the server does. Exit code 1 if any
    request failed."""
    for package in ("httptools", "msgspec"):
        if importlib.util.find_spec(package) is None:
            raise InvalidConfig(f"this needs {package}, which is not installed; pip install 'ridgeline[serve]'.")
    if endpoint not in ("completions", "chat"):
        raise InvalidConfig(f"--endpoint must be completions or chat, got {endpoint!r}.")
    if plot is not None and plot.suffix not in (".svg", ".png", ".pdf"):
        raise InvalidConfig(f"--plot writes .svg, .png or .pdf, got {str(plot)!r}.")
    from ridgeline_bench.serving import trace as traces
    from ridgeline_bench.serving.campaign import Campaign
    from ridgeline_bench.serving.figures import Slo
    from ridgeline_bench.serving.session import parse_rates
    from ridgeline_bench.serving.start import Elsewhere, ended_by_sigterm
    from ridgeline_bench.serving.work import Lengths, Work, prefix

    shared = prefix(shared_prefix)
    rows = traces.read(trace) if trace is not None else ()
    work = Work(
        seed=seed,
        count=num_requests or (0 if duration or rows else DEFAULT_COUNT),
        duration=duration,
        burstiness=burstiness,
        input_len=Lengths.parse(input_len, "--input-len"),
        output_len=Lengths.parse(output_len, "--output-len"),
        prefix_tokens=shared[0],
        prefix_groups=shared[1],
        vocab_size=vocab_size,
        chat=endpoint == "chat",
        trace=rows,
    )
    fields = {"temperature": temperature, "ignore_eos": True if ignore_eos else None, **json_object(extra, "--extra")}
    begin = partial(
        _begin,
        work=work,
        api_key=api_key,
        rates=parse_rates(rate, work),
        slo=Slo.parse(slo),
        fields=fields,
        max_concurrency=max_concurrency,
        timeout=timeout,
        processes=client_processes,
    )
    options = {
        "input_len": input_len, "output_len": output_len, "trace": str(trace or ""), "shared_prefix": shared_prefix,
        "burstiness": str(burstiness), "num_requests": num_requests, "duration": duration, "seed": seed,
        "endpoint": endpoint, "fields": fields, "slo": slo, "max_concurrency": max_concurrency,
        "client_processes": client_processes, **({"dummy": dummy} if start else {"url": url}),
    }  # fmt: skip
    notes = _Notes(out, plot, commit, options, local=bool(start))
    with ExitStack() as opened:
        targets: Sequence[Target] = [Elsewhere(url=url, model=model, vocab_size=vocab_size)]
        if start:
            spare = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="ridgeline-")))
            targets = _starts(start, model, dummy, peer_path, peer_python, logs, start_timeout, spare)
        campaign = Campaign(targets=targets, begin=begin, complain=notes.complain, within=within, warmup=warmup)
        opened.enter_context(ended_by_sigterm())
        bar = opened.enter_context(_bar())
        for curve in campaign.run(partial(_watched, bar)):
            notes.take(curve)
    notes.show(as_json)
    raise typer.Exit(int(notes.failed))


def _begin(up: Up, until: float, *, work: Any, **options: Any) -> Session:
    from ridgeline_bench.serving.session import Session

    work = replace(work, vocab_size=work.vocab_size or up.vocab_size)
    return Session.begin(url=up.url, model=up.model, work=work, until=until, **options)


def _starts(
    texts: Sequence[str], model: str, dummy: bool, peer_path: Path | None, peer_python: str, logs: Path | None,
    timeout: float, spare: Path,
) -> Sequence[Target]:  # fmt: skip
    """Return the servers to start. `spare` is an empty folder, for a model that has to be completed."""
    from ridgeline.weights.folder import EMBEDDED_MODEL, resolve_model
    from ridgeline_bench.runner import Where
    from ridgeline_bench.serving import vocabulary
    from ridgeline_bench.serving.start import Site, Start

    folder = resolve_model(model or EMBEDDED_MODEL).resolve()
    name = folder.name if not model or Path(model).exists() else model
    if dummy and not vocabulary.has_tokenizer(folder):
        folder = vocabulary.complete(folder, spare)
    site = Site(
        folder=folder,
        name=name,
        vocab_size=vocabulary.vocab_size(folder),
        dummy=dummy,
        peer=Where(python=peer_python or sys.executable, path=(peer_path.resolve(),) if peer_path else ()),
        logs=logs,
        timeout=timeout,
    )
    return Start.parse(texts, site)


def _bar() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


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
    says that the servers run on this machine."""

    out: Path | None
    plot: Path | None
    commit: str
    options: dict[str, Any]
    local: bool
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
        self.failed |= bool(found.errors)
        for warning in found.warnings:
            print(f"ridgeline: {curve.label}: {warning}", file=sys.stderr)
        if self.out is not None:
            self._append(self.out, curve, new)
        if self.plot is not None:
            from ridgeline_bench.serving.plot import draw

            names = dict.fromkeys(f"{c.server.engine} {c.server.version}".strip() for c in self.curves.values())
            draw(
                {label: c.points for label, c in self.curves.items()},
                f"{curve.server.model}: {' and '.join(names)}",
                self.plot,
            )

    def _append(self, out: Path, curve: Curve, new: bool) -> None:
        from ridgeline_bench.results import append, gpu, host
        from ridgeline_bench.serving.show import records, start_record

        machine = replace(host(), gpu=gpu()) if self.local else replace(host(), torch="", triton="")
        if self.commit:
            machine = replace(machine, commit=self.commit, dirty=False)
        options = {**self.options, "server": curve.label}
        if new and curve.start:
            append(out, [start_record(curve.start, curve.server, machine, options)])
        append(out, records(curve.points[-1], curve.server, machine, options))

    def show(self, as_json: bool) -> None:
        from ridgeline_bench.serving import show

        if as_json:
            print(json.dumps([show.as_json(c.label, c.points, c.server) for c in self.curves.values()]))
            return
        for curve in self.curves.values():
            server = curve.server
            version = f"{server.engine} {server.version}".strip()
            label = "" if curve.label in (version, server.engine) else f" ({curve.label})"
            Console().print(show.table(curve.points, f"{server.model} on {version}{label}"))
