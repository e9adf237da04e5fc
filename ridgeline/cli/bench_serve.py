"""`ridgeline bench serve`: load on a running server, ours or another that speaks OpenAI's API."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ridgeline.core.errors import InvalidConfig

if TYPE_CHECKING:
    from ridgeline.bench.serving.figures import Point
    from ridgeline.bench.serving.server import Server

DEFAULT_COUNT = 200


def serve(
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Default: the first of /v1/models.")] = "",
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")] = "",
    rate: Annotated[str, typer.Option(help="Requests a second; 1,2,4 for a curve; inf: all at once.")] = "",
    burstiness: Annotated[float, typer.Option(help="Of arrivals: 1 Poisson, below burstier, inf even.")] = 1.0,
    num_requests: Annotated[int, typer.Option(min=0, help="Of each rate (default 200, or what --duration is).")] = 0,
    duration: Annotated[float, typer.Option(min=0, help="Seconds in which requests of a rate leave.")] = 0.0,
    input_len: Annotated[str, typer.Option(help="Tokens: N, LOW:HIGH, or MEAN,DEVIATION[,MAX] (lognormal).")] = "512",
    output_len: Annotated[str, typer.Option(help="Tokens, in the same forms.")] = "128",
    trace: Annotated[Path | None, typer.Option(help="JSON lines: timestamp, lengths or prompt of requests.")] = None,
    shared_prefix: Annotated[
        str, typer.Option(help="TOKENS[,GROUPS] that requests begin with, beside their own.")
    ] = "",
    vocab_size: Annotated[int, typer.Option(min=0, help="Random ids are below; default: what the server says.")] = 0,
    seed: Annotated[int, typer.Option(help="Of every draw.")] = 0,
    endpoint: Annotated[str, typer.Option(help="completions (token ids) or chat (words).")] = "completions",
    temperature: Annotated[float, typer.Option(min=0, help="Of sampling.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Answers have exactly the length asked for.")] = True,
    extra: Annotated[str, typer.Option(help="JSON object of further body fields; null takes one of ours out.")] = "",
    slo: Annotated[str, typer.Option(help="ttft=200,itl=20,tpot=…,e2e=… in ms: goodput counts what meets all.")] = "",
    max_concurrency: Annotated[int, typer.Option(min=0, help="Requests open at once; 0: as many as there are.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds a request may take.")] = 600.0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests sent before, one by one, not counted.")] = 2,
    client_processes: Annotated[int, typer.Option(min=1, help="Processes that send.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Results are appended to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture of the curve (.svg; .png needs matplotlib).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
    commit: Annotated[str, typer.Option(help="Recorded with the results; default: what git says.")] = "",
) -> None:
    """Open-loop load: requests leave at their time, whatever the server does. Exit code 1 if any failed."""
    for package in ("httptools", "msgspec"):
        if importlib.util.find_spec(package) is None:
            raise InvalidConfig(f"this needs {package}, which is not installed; pip install 'ridgeline[serve]'.")
    if endpoint not in ("completions", "chat"):
        raise InvalidConfig(f"--endpoint must be completions or chat, got {endpoint!r}.")
    if plot is not None and plot.suffix not in (".svg", ".png", ".pdf"):
        raise InvalidConfig(f"--plot writes .svg, .png or .pdf, got {str(plot)!r}.")
    from ridgeline.bench.serving import trace as traces
    from ridgeline.bench.serving.figures import Slo
    from ridgeline.bench.serving.session import Session, parse_rates
    from ridgeline.bench.serving.work import Lengths, Work, prefix

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
    fields = {"temperature": temperature, "ignore_eos": True if ignore_eos else None, **_object(extra)}
    session = Session.begin(
        url=url,
        api_key=api_key,
        model=model,
        work=work,
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
        "client_processes": client_processes, "url": url,
    }  # fmt: skip
    points = []
    with _bar() as bar:
        session.warm_up(warmup)
        for found in session.measure(_watched(bar)):
            points.append(found)
            if out is not None:  # at once: the next rate may be one too many
                _save(found, session.server, out, commit, options)
            for warning in found.warnings:
                print(f"ridgeline: {warning}", file=sys.stderr)
    _show(
        points, session.server, f"{session.server.model} on {session.server.engine} {session.server.version}", as_json
    )
    if plot is not None:
        from ridgeline.bench.serving.plot import draw

        draw(points, f"{session.server.model}, {session.server.engine}", plot)
    raise typer.Exit(int(any(p.errors for p in points)))


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise InvalidConfig(f"--extra must be a JSON object, got {text!r} ({error}).") from error
    if not isinstance(value, dict):
        raise InvalidConfig(f"--extra must be a JSON object, got {text!r}.")
    return value


def _bar() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def _watched(bar: Progress) -> Callable[[str, int, int], None]:
    """A rate's name, its requests, and how many of them have ended → the bar of that rate."""
    tasks: dict[str, Any] = {}

    def watch(name: str, total: int, ended: int) -> None:
        if name not in tasks:
            tasks[name] = bar.add_task(name, total=total)
        bar.update(tasks[name], completed=ended)

    return watch


def _save(found: Point, server: Server, out: Path, commit: str, options: dict[str, Any]) -> None:
    from ridgeline.bench.results import append, host
    from ridgeline.bench.serving.show import records

    machine = replace(host(), commit=commit, dirty=False) if commit else host()
    append(out, records(found, server, machine, options))


def _show(points: Sequence[Point], server: Server, title: str, as_json: bool) -> None:
    from ridgeline.bench.serving import show

    if as_json:
        print(json.dumps(show.as_json(points, server)))
    else:
        Console().print(show.table(points, title))
