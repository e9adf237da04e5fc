"""`ridgeline bench`: measure, compare, tell noise from change, report."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ridgeline.cli.bench_serve import serve
from ridgeline.cli.lists import ListCommand
from ridgeline.cli.options import json_object, with_ranks, with_records
from ridgeline.cli.peers import ENGINE_NAMES, PeerFlags, renamed
from ridgeline.cli.tracked import TrackFlags, tracked
from ridgeline.core.errors import InvalidConfig
from ridgeline.tracking import Tracker

if TYPE_CHECKING:
    from ridgeline_bench.results import Record
    from ridgeline_bench.setup import Setup

app = typer.Typer(help="Measure speed, beside the hardware's limit and beside peers.", no_args_is_help=True)
app.command(cls=ListCommand)(serve)

Model = Annotated[str, typer.Option(help="Model folder or hub id; the embedded model when none is given.")]
Engine = Annotated[str, typer.Option(help=f"ridgeline, {ENGINE_NAMES}.")]
DType = Annotated[str, typer.Option(help="auto (the checkpoint's own), float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dummy = Annotated[bool, typer.Option("--dummy", help="Random weights: only config.json is needed.")]
Extra = Annotated[str, typer.Option(help="JSON object of further arguments for our engine.")]
MaxLen = Annotated[int, typer.Option(help="Longest prompt + output, in tokens (0: the model's, at most 32768).", min=0)]
Timeout = Annotated[
    float, typer.Option(help="Seconds that one engine may take; what it measured by then counts.", min=1)
]
Out = Annotated[Path, typer.Option(help="Results are appended to this file.")]
Commit = Annotated[str, typer.Option(help="Recorded with the results; default: what git says.")]
Scale = Annotated[float, typer.Option(help="Factor on request counts and lengths, for small machines.")]
Only = Annotated[str, typer.Option(help="Workloads, separated by commas: W1, W2, W3 (or W3-b8), W4, W5.")]
RESULTS = Path("benchmarks/results/results.jsonl")


@dataclass(frozen=True)
class LoadFlags:
    """The way to load a model."""

    dtype: DType = "auto"
    device: Device = "auto"
    dummy: Dummy = False
    extra: Extra = ""


@dataclass(frozen=True)
class KeepFlags(TrackFlags):
    """The time of a measurement, and where it is kept."""

    timeout: Timeout = 3600
    out: Out = RESULTS
    commit: Commit = ""


@dataclass(frozen=True)
class StartupKeepFlags(KeepFlags):
    timeout: Timeout = 600


@dataclass(frozen=True)
class JobFlags:
    """The jobs of a sweep, and how long it may take."""

    case: Annotated[list[str] | None, typer.Option(help="Only these cases.")] = None
    form: Annotated[list[str] | None, typer.Option(help="Only these formats of weights or caches.")] = None
    tokens: Annotated[list[int] | None, typer.Option(help="Only cases of so many tokens.")] = None
    chosen: Annotated[bool, typer.Option("--chosen", help="Only cuts that would be chosen.")] = False
    best: Annotated[
        int, typer.Option(min=0, help="Of a case's cuts only so many, the first ones by the model; 0: all.")
    ] = 0
    beside: Annotated[
        bool, typer.Option("--beside", help="Only real shapes, as this GPU runs them, beside other projects' kernels.")
    ] = False
    seconds: Annotated[float, typer.Option(min=0, help="Stop by then, compiling included; 0: what is usual.")] = 0
    bandwidth: Annotated[float, typer.Option(min=0, help="TB/s of the memory; 0: an H200's.")] = 0


@dataclass(frozen=True)
class WalkFlags:
    """The way to go through the jobs of a sweep."""

    dry: Annotated[bool, typer.Option("--dry", help="Walk all jobs with small shapes on a CPU.")] = False
    compile_only: Annotated[bool, typer.Option("--compile-only", help="Compile all kernels without a GPU.")] = False
    processes: Annotated[int, typer.Option(min=0, help="That compile; 0: one a core, at most 16.")] = 0


def _setup(model: str, load: LoadFlags, keep: KeepFlags, ranks: dict[str, Any], **given: Any) -> Setup:
    from ridgeline_bench.setup import Setup

    loading = asdict(load) | {"extra": {**ranks, **json_object(load.extra)}}
    return Setup(model=model, timeout=keep.timeout, commit=keep.commit, **loading, **given)


@app.command()
@with_ranks
@with_records
def throughput(
    model: Model = "",
    requests: Annotated[int, typer.Option(min=1, help="Requests, all at once.")] = 64,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 256,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of each output.")] = 128,
    engine: Engine = "ridgeline",
    *,
    load: LoadFlags,
    keep: KeepFlags,
    ranks: dict[str, Any],
) -> None:
    """Measure the tokens per second of many requests of one length."""
    setup = _setup(model, load, keep, renamed(engine, ranks))
    shape = {"count": requests, "input_len": input_len, "output_len": output_len}
    with _tracked(keep, "throughput", setup, {"engine": engine, "requests": requests, **shape}) as tracker:
        _finish(setup.throughput(engine, shape), keep.out, tracker)


@app.command()
@with_ranks
@with_records
def latency(
    model: Model = "",
    requests: Annotated[int, typer.Option(min=1, help="Requests, one after the other.")] = 10,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of each output.")] = 128,
    engine: Engine = "ridgeline",
    *,
    load: LoadFlags,
    keep: KeepFlags,
    ranks: dict[str, Any],
) -> None:
    """Measure batch 1: time to first token and between tokens, as percentiles."""
    setup = _setup(model, load, keep, renamed(engine, ranks))
    shape = {"requests": requests, "input_len": input_len, "output_len": output_len}
    with _tracked(keep, "latency", setup, {"engine": engine, **shape}) as tracker:
        _finish(setup.latency(engine, shape), keep.out, tracker)


@app.command()
@with_ranks
@with_records
def startup(
    model: Model = "",
    repeats: Annotated[int, typer.Option(min=1, help="Processes started, one after the other.")] = 3,
    engine: Engine = "ridgeline",
    *,
    load: LoadFlags,
    keep: StartupKeepFlags,
    ranks: dict[str, Any],
) -> None:
    """Measure the time from process start to a ready engine and to the first tokens."""
    setup = _setup(model, load, keep, renamed(engine, ranks))
    with _tracked(keep, "startup", setup, {"engine": engine, "repeats": repeats}) as tracker:
        _finish(setup.startup(engine, repeats), keep.out, tracker)


@app.command()
@with_ranks
@with_records
def compare(
    model: Model = "",
    *,
    peer: PeerFlags,
    only: Only = "",
    scale: Scale = 1.0,
    load: LoadFlags,
    max_model_len: MaxLen = 0,
    keep: KeepFlags,
    ranks: dict[str, Any],
) -> None:
    """Run W1 … W5 on us and a peer in turn, each in its own process, beside the limit."""
    other_side = peer.of_process()
    if peer.peer != "none":
        named = renamed(peer.peer, {} if other_side["extra"] else ranks)
        other_side["extra"] = other_side["extra"] or named
    from ridgeline_bench.setup import Peer
    from ridgeline_bench.tables import side_by_side

    setup = _setup(model, load, keep, ranks, scale=scale, max_model_len=max_model_len)
    names = tuple(name for name in only.split(",") if name)
    other = Peer(**other_side)
    sides, failed = [], False
    with _tracked(keep, "compare", setup, {"peer": peer.peer, "only": only}) as tracker:
        for outcome in setup.compare(names, other):  # written when one side is done, because the other may still fail
            _save(outcome, keep.out, tracker)
            sides.append(outcome.records)
            failed |= outcome.failed
        if len(sides) == 1:
            sides.append([])
        Console().print(side_by_side(*sides))
        raise typer.Exit(int(failed))


@app.command()
@with_records
def kernels(
    op: Annotated[
        str,
        typer.Option(
            help="Only ops, or rungs of a ladder, whose name contains this (rungs: or one of several, with commas)."
        ),
    ] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; default: bfloat16 on a GPU.")] = "",
    device: Device = "auto",
    real: Annotated[bool | None, typer.Option(help="Also time shapes of real models (default: on a GPU).")] = None,
    ladder: Annotated[
        str,
        typer.Option(help="Instead: the rungs of a ladder, gemm, attention or memory_bound; or micro: questions."),
    ] = "",
    cubins: Annotated[
        Path | None, typer.Option(help="With --ladder: a folder with the rungs' machine code, made on another machine.")
    ] = None,
    out: Out = RESULTS,
    commit: Commit = "",
    *,
    track: TrackFlags,
) -> None:
    """Check and time every op's implementations on the cases that its tests use."""
    if cubins is not None and not ladder:
        raise InvalidConfig("--cubins holds the machine code of a ladder's rungs; give --ladder too, or leave it out.")
    if cubins is not None and not cubins.is_dir():
        raise InvalidConfig(f"--cubins must be a folder, got {str(cubins)[:80]!r}; compile the rungs to it first.")
    if ladder:
        return _ladder(ladder, op, device, out, commit, cubins)
    from ridgeline_bench.results import append
    from ridgeline_bench.setup import kernels as measure
    from ridgeline_bench.tables import kernels as table

    with tracked(track, "kernels", {"op": op, "dtype": dtype, "device": device, "real": real}) as tracker:
        timings, records = measure(op=op, dtype=dtype, device=device, real=real, commit=commit)
        append(out, [r for r in records if r.value])
        _note(tracker, [r for r in records if r.value])
        Console().print(table(timings, records))
        if wrong := sum(bool(t.error) for t in timings):
            Console(stderr=True).print(f"{wrong} of {len(timings)} failed; they have no speed.")
            raise typer.Exit(1)


def _ladder(name: str, only: str, device: str, out: Path, commit: str, cubins: Path | None) -> None:
    if name == "micro":
        return _micros(only, device, out, commit, cubins)
    from ridgeline_bench.results import append
    from ridgeline_bench.setup import ladder
    from ridgeline_bench.tables import rungs

    times = []
    with Console(stderr=True).status(f"{name} ladder") as status:
        for time, record in ladder(name, device, commit, cubins, only):  # kept one by one: a ladder takes minutes
            append(out, [record] if record else [])
            status.update(f"{name} ladder: {time.problem} {time.rung}")
            times.append(time)
    Console().print(rungs(times))
    if any(each.error for each in times):
        raise typer.Exit(1)


def _micros(only: str, device: str, out: Path, commit: str, cubins: Path | None) -> None:
    from ridgeline_bench.results import append
    from ridgeline_bench.setup import micros
    from ridgeline_bench.tables import answers

    found = []
    with Console(stderr=True).status("micros") as status:
        for answer, record in micros(device, commit, cubins, only):
            append(out, [record] if record else [])
            status.update(f"{answer.micro.name}: {answer.case.name}")
            found.append(answer)
    Console().print(answers(found))
    if any(each.error for each in found):
        raise typer.Exit(1)


@app.command(cls=ListCommand)
@with_records
def sweep(
    name: Annotated[str, typer.Argument(metavar="OP", help="An op.")],
    *,
    jobs: JobFlags,
    json: Annotated[Path | None, typer.Option(help="Result lines are appended to this file.")] = None,
    walk: WalkFlags,
    commit: Commit = "",
) -> None:
    """Check every implementation and every cut of an op's kernels on a GPU, then time it."""
    if walk.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    from ridgeline_bench.sweep.options import SweepOptions, kind_of, loaded
    from ridgeline_bench.sweep.runs import run

    options = SweepOptions(
        name=name, case=tuple(jobs.case or ()), form=tuple(jobs.form or ()),
        tokens=tuple(jobs.tokens or ()), chosen=jobs.chosen, best=jobs.best, beside=jobs.beside, seconds=jobs.seconds,
        bandwidth=1e12 * jobs.bandwidth,
        dry=walk.dry, compile_only=walk.compile_only, processes=walk.processes or min(16, os.cpu_count() or 1),
    )  # fmt: skip
    run(loaded(kind_of(name)), options, json, commit)


@app.command()
def diff(
    files: Annotated[list[Path] | None, typer.Argument(help="A.jsonl B.jsonl; or one file and --commits.")] = None,
    commits: Annotated[str, typer.Option(help="Two commits A,B whose results are compared.")] = "",
    run: Annotated[tuple[str, str] | None, typer.Option(help="Two shell commands, run in turn instead.")] = None,
    pairs: Annotated[int, typer.Option(min=5, help="Runs of each command.")] = 30,
    threshold: Annotated[float, typer.Option(min=0, help="Differences up to this share count as none.")] = 0.02,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds one run may take.")] = 600,
) -> None:
    """Compare A and B: faster, slower, or no different. Exit code 1 if anything is slower."""
    from ridgeline_bench import diff as differ
    from ridgeline_bench.noise import compare, in_turn
    from ridgeline_bench.results import read
    from ridgeline_bench.tables import verdicts

    if run is not None:
        a, b = (differ.command_seconds(command, timeout) for command in run)
        found = compare(*in_turn(a, b, pairs), threshold=threshold, paired=True)
        Console().print(f"B is {found} (median ratio, {pairs} pairs)")
        raise typer.Exit(int(found.verdict == "slower"))
    if commits:
        first, _, second = commits.partition(",")
        records = read(files or [])
        sides = differ.of_commit(records, first), differ.of_commit(records, second)
    elif files and len(files) == 2:
        sides = read(files[:1]), read(files[1:])
    else:
        raise InvalidConfig("give two result files, or files and --commits A,B, or --run 'COMMAND A' 'COMMAND B'.")
    rows = differ.diff(*sides, threshold=threshold)
    Console().print(verdicts(rows))
    raise typer.Exit(int(any(row.comparison and row.comparison.verdict == "slower" for row in rows)))


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="Result files (.jsonl).")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page: roofline, workloads beside limit and peers, history, tables."""
    from ridgeline_bench.report import write
    from ridgeline_bench.results import read

    write(read(results), out)
    Console().print(f"wrote {out}", soft_wrap=True)


def _tracked(
    flags: TrackFlags, verb: str, setup: Setup, shape: Mapping[str, object]
) -> AbstractContextManager[Tracker]:
    from ridgeline_bench.results import host

    return tracked(flags, f"bench {verb}", asdict(setup), shape, asdict(host()))


def _note(tracker: Tracker, records: Sequence[Record]) -> None:
    """Keep each figure as a metric of its engine, workload and name."""
    tracker.metrics(0, {f"{r.engine}/{r.workload}/{r.metric}": r.value for r in records})


def _finish(outcome: Any, out: Path, tracker: Tracker) -> None:
    from ridgeline_bench.tables import figures

    _save(outcome, out, tracker)
    Console().print(figures(outcome.records))
    raise typer.Exit(int(outcome.failed))


def _save(outcome: Any, out: Path, tracker: Tracker) -> None:
    from ridgeline_bench.results import append

    append(out, outcome.records)
    _note(tracker, outcome.records)
    for note in outcome.notes:
        print(f"ridgeline: {note}", file=sys.stderr)
