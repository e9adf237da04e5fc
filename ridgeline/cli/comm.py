"""`ridgeline comm`: what ranks say to each other, measured on this machine or computed over a network."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import TimeElapsedColumn

from ridgeline.cli import comm_network
from ridgeline.cli.options import with_records
from ridgeline.core.errors import InvalidConfig
from ridgeline.progress import counted

if TYPE_CHECKING:
    from ridgeline_bench.communication.figures import Figure
    from ridgeline_bench.communication.runs import Request

SIZES = {"cuda": "1K:1G", "cpu": "1K:64M"}

app = typer.Typer(
    help="Measure what ranks of this machine say to each other, or compute it for a network.", no_args_is_help=True
)
app.command()(comm_network.network)


@dataclass(frozen=True)
class CaseFlags:
    """The ops, sizes and ways, and the ranks."""

    ops: Annotated[
        str,
        typer.Option(
            help="all_reduce, all_reduce_norm, all_gather, reduce_scatter, all_to_all, exchange, send (put, get), copy."
        ),
    ] = ""
    sizes: Annotated[
        str, typer.Option(help="8K,64K,1M, or 1K:1G in steps of four (default: that; on a CPU up to 64M).")
    ] = ""
    backends: Annotated[str, typer.Option(help="Ways, separated by commas (default: all that there are).")] = ""
    ranks: Annotated[int, typer.Option(min=0, help="Ranks (default: all GPUs; 2 on a CPU).")] = 0
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"


@dataclass(frozen=True)
class ReportFlags:
    """The forms of the results."""

    keep: Annotated[bool, typer.Option("--keep", help="Keep the fitted lines for `ridgeline plan`.")] = False
    out: Annotated[Path | None, typer.Option(help="Append the figures to this result file (.jsonl).")] = None
    plot: Annotated[Path | None, typer.Option(help="Picture of time and bandwidth over size (.svg).")] = None
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False
    commit: Annotated[str, typer.Option(help="Recorded with the results; default: what git says.")] = ""


@app.command()
@with_records
def bench(
    *,
    cases: CaseFlags,
    seconds: Annotated[float, typer.Option(min=1, help="Time for everything; what is left then is left out.")] = 300,
    effort: Annotated[float, typer.Option(min=0, help="Seconds for each size of each op and way.")] = 0.1,
    report: ReportFlags,
) -> None:
    """Measure latency and bus bandwidth of collectives over GPUs (NCCL by protocol and algorithm, our own sums,
    symmetric memory, copies), or over processes on a CPU (gloo). Every result is checked before it is timed. Exit code
    1 if one was wrong or processes failed."""
    plot = report.plot
    if plot is not None and plot.suffix != ".svg":
        raise InvalidConfig(f"--plot writes .svg, got {str(plot)!r}.")
    try:  # of all that is needed, tables and pictures too: what is missing must not be found after minutes of measuring
        from ridgeline.perf.links import save_links
        from ridgeline.worker.machine import device_name, hardware_of
        from ridgeline_bench.communication.figures import (
            lines,
            link_between_gpus,
            links,
            parse_ops,
            parse_sizes,
            records,
        )
        from ridgeline_bench.communication.runs import Request
        from ridgeline_bench.communication.runs import backends as known
        from ridgeline_bench.communication.show import draw
        from ridgeline_bench.results import append, host_with
    except ModuleNotFoundError as error:
        raise _missing(error) from error

    where, ranks = _device(cases.device, cases.ranks)
    request = Request(
        device=where.type,
        ranks=ranks,
        ops=parse_ops(cases.ops),
        sizes=parse_sizes(cases.sizes or SIZES[where.type]),
        backends=[name.strip() for name in cases.backends.split(",") if name.strip()] or known(where.type, ranks),
        seconds=seconds,
        effort=effort,
    )
    link = link_between_gpus() if where.type == "cuda" else "loopback"
    machine, date = host_with(where, report.commit), datetime.now(UTC).isoformat(timespec="seconds")
    found, failed = _measured(request)
    if report.out is not None:
        append(report.out, records(found, machine, link, hardware_of(where)))
    if report.keep:
        path = save_links(links(found, device_name(where), machine, date, link))
        print(f"ridgeline: kept in {path}", file=sys.stderr)
    title = f"{ranks} x {device_name(where)}{f' ({link})' if link else ''}, torch {machine.torch}, {date[:10]}"
    if plot is not None:
        draw(found, title, plot)
    if report.as_json:
        about = {"device": device_name(where), "ranks": ranks, "link": link, "date": date, "machine": asdict(machine)}
        fitted = [line._asdict() | {"bus_gb_s": line.bus / 1e9 if line.beta else None} for line in lines(found)]
        print(json.dumps({**about, "figures": [each.as_dict for each in found], "lines": fitted}))
    else:
        _show(found, title)
    raise typer.Exit(int(failed or any(each.wrong for each in found)))


def _missing(error: ModuleNotFoundError) -> Exception:
    """Return an error that names the missing package; the error itself if a module of our own is missing."""
    package = str(error.name).partition(".")[0]
    if package in ("ridgeline", "ridgeline_bench"):
        return error
    return InvalidConfig(f"comm bench needs the package {package}, which is not installed.")


def _device(name: str, ranks: int) -> tuple[Any, int]:
    """Return the kind of device and the number of ranks. Raise InvalidConfig for more ranks than GPUs."""
    import torch

    from ridgeline.defaults import choose_device

    device = choose_device(name)
    if device.type == "cpu":
        return device, ranks or 2
    there = torch.cuda.device_count()
    if ranks > there:
        raise InvalidConfig(f"{ranks} ranks need as many GPUs, and there are {there}; give --ranks or --device cpu.")
    return torch.device("cuda", 0), ranks or there


def _measured(request: Request) -> tuple[list[Figure], bool]:
    """Return all figures, and True if processes failed. What goes wrong is said as soon as it does."""
    from ridgeline_bench.communication.figures import figure, size_name
    from ridgeline_bench.communication.runs import run

    found, failed = [], False
    with counted("{task.description}", TimeElapsedColumn()) as bar:
        total = sum(len(cases) for _, cases in request.chosen())
        task = bar.add_task("starting", total=total)
        for event in run(request):
            if event["event"] == "begins":
                bar.update(task, description=f"{event['op']} {size_name(event['bytes'])} {event['backend']}")
            elif event["event"] == "late":
                print(f"ridgeline: the time is over; {event['left']} cases are left out", file=sys.stderr)
            elif event["event"] == "lost":
                failed = True
                print(f"ridgeline: {', '.join(event['backends'])}: {event['why']}", *event["log"], sep="\n  ",
                      file=sys.stderr)  # fmt: skip
            elif (one := figure(event)) is not None:
                found.append(one)
                bar.update(task, advance=1)
    return found, failed


def _show(found: list[Figure], title: str) -> None:
    from ridgeline_bench.communication.figures import lines
    from ridgeline_bench.communication.show import line_table, reasons, tables

    console = Console()
    console.print(title, highlight=False, soft_wrap=True)
    for name, table in tables(found):
        console.print(name, table, highlight=False)
    if fitted := lines(found):
        console.print(
            "seconds = alpha + beta x bytes; the bus bandwidth is that of beta", line_table(fitted), highlight=False
        )
    for sentence in reasons(found):
        console.print(sentence, highlight=False, soft_wrap=True)
