"""The runner of engines, each in a process of its own, which turns their events into records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import Empty, Queue
from typing import IO, Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ridgeline.core.errors import InvalidConfig, RidgelineError
from ridgeline_bench.engines import LoadOptions
from ridgeline_bench.results import STAGE, Machine, Record, host
from ridgeline_bench.workloads import Size

ROOT = Path(__file__).parents[1]


class BenchmarkFailed(RidgelineError):
    """The measuring process failed. The sentence says at what, and `log` is the end of its output, shown after that."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self._log = log

    def __str__(self) -> str:
        return super().__str__() + self._log


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job of one process. `workloads` are names (empty: all, None: none); `throughput`, `latency`, `trace` and
    `adapters` hold their parameters. With `only_check` the engine is imported and nothing more."""

    engine: str
    model: str
    options: LoadOptions
    size: Size
    workloads: tuple[str, ...] | None = None
    throughput: Mapping[str, int] | None = None
    latency: Mapping[str, int] | None = None
    trace: Mapping[str, Any] | None = None
    adapters: Mapping[str, Any] | None = None
    only_check: bool = False


@dataclass(frozen=True, kw_only=True)
class Where:
    """The way to start the process: which Python, folders put before its module path, and the seconds it may take in
    all."""

    python: str = sys.executable
    path: tuple[Path, ...] = ()
    timeout: float = 3600.0

    def environment(self) -> dict[str, str]:
        own = [str(ROOT)] if (ROOT / "ridgeline").is_dir() else []
        inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, self.path), *own, *inherited])}


@dataclass
class Outcome:
    """The figures in the order they came, and what was left out, with the reason. `failed` means that an error ended
    the engine."""

    records: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: bool = False


def run(job: Job, where: Where = Where(), *, model_name: str = "", commit: str = "") -> Outcome:
    """Run `job`. Figures measured before it took too long or failed count, and a note says what happened.

    Raise InvalidConfig if the job cannot run at all, and BenchmarkFailed if the engine failed before it was ready.
    """
    outcome = Outcome()
    with _progress() as told:
        told(f"{job.engine}: loading")
        try:
            for event in _events(job, where):
                _take(event, outcome, job, model_name=model_name, commit=commit)
                told(f"{job.engine}: {event.get('workload', event['event'])}")
        except BenchmarkFailed as error:
            if not outcome.records:
                raise
            outcome.failed = True
            outcome.notes.append(str(error))
    return outcome


def check(job: Job, where: Where) -> None:
    """Import a job's engine in a process of its own. Raise InvalidConfig if that fails."""
    with _progress() as told:
        told(f"{job.engine}: importing")
        for event in _events(replace(job, only_check=True), where):
            if event["event"] == "timeout":
                raise InvalidConfig(f"{job.engine} was not imported in {where.timeout:g} s; raise --timeout.")


def _take(event: Mapping[str, Any], outcome: Outcome, job: Job, *, model_name: str, commit: str) -> None:
    """Turn one event into what it adds to the outcome. The first record, of "ready", tells the later ones the rest."""
    kind = event["event"]
    if kind == "ready":
        outcome.records.append(_ready(event, job, model_name or job.model, commit))
        for name, seconds in event.get("stages", {}).items():
            outcome.records.append(_startup(outcome.records[0], STAGE + name, seconds))
    elif kind == "first":
        outcome.records.append(_startup(outcome.records[0], "first token", event["seconds"]))
    elif kind == "metric":
        outcome.records.append(_figure(outcome.records[0], event))
    elif kind == "skip":
        outcome.notes.append(f"{job.engine} leaves out {event['workload']}: it {event['why']}.")
    elif kind == "timeout":
        outcome.notes.append(f"{job.engine} was stopped after {event['seconds']:g} s, during {event['at']}.")


def _events(job: Job, where: Where) -> Iterator[dict[str, Any]]:
    """Yield the process' events. The last one is `timeout` if it took too long."""
    text = json.dumps({**asdict(job), "spawned": time.monotonic()})
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [where.python, "-m", "ridgeline_bench.child", text],
            stdout=subprocess.PIPE,
            stderr=log,
            stdin=subprocess.DEVNULL,
            text=True,
            env=where.environment(),
            start_new_session=True,  # so that a time-out ends the engine's own processes too
        )
        try:
            yield from _read(process, where.timeout, log)
        finally:
            _end(process)


def _read(process: subprocess.Popen[str], timeout: float, log: IO[bytes]) -> Iterator[dict[str, Any]]:
    lines: Queue[str | None] = Queue()
    threading.Thread(target=_pump, args=(process, lines), daemon=True).start()
    deadline, at = time.monotonic() + timeout, "loading"
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            yield {"event": "timeout", "at": at, "seconds": timeout}
            return
        if line is None:
            code = process.wait()
            _end(process)
            raise BenchmarkFailed(f"the measuring process ended during {at}, exit code {code}.", tail(log))
        event = json.loads(line)
        if event["event"] == "done":
            return
        if event["event"] == "error":
            if event["code"] == 2:
                raise InvalidConfig(event["message"])
            _end(process)
            raise BenchmarkFailed(f"the measuring process failed during {at}: {event['message']}", tail(log))
        at = event.get("workload", at)
        yield event


def _pump(process: subprocess.Popen[str], lines: Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _end(process: subprocess.Popen[str]) -> None:
    """Give the process ten seconds to leave by itself unless it is still busy, then end it and what it started."""
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tail(log: IO[bytes], lines: int = 12) -> str:
    """Return the end of a log. The process that writes it shares the file's position, so it is read without moving
    that."""
    size = os.fstat(log.fileno()).st_size
    text = os.pread(log.fileno(), 1 << 16, max(0, size - (1 << 16))).decode(errors="replace")
    return "".join(f"\n{line}" for line in text.splitlines()[-lines:])


def _ready(event: Mapping[str, Any], job: Job, model_name: str, commit: str) -> Record:
    known = host()
    machine: Machine = replace(
        known,
        **{name: event[name] for name in ("gpu", "torch", "triton", "python")},
        commit=commit or known.commit,
        dirty=False if commit else known.dirty,
    )
    threads = {"threads": event["threads"]} if event["threads"] else {}
    blank = Record(
        engine=job.engine,
        version=event["version"],
        model=model_name,
        dtype=event["dtype"],
        machine=machine,
        options={**_asked(job), **threads},
        workload="startup",
        metric="",
        value=0.0,
        unit="s",
    )
    return _startup(blank, "ready", event["seconds"])


def _startup(base: Record, metric: str, seconds: float) -> Record:
    return replace(base, metric=metric, value=seconds, samples=(seconds,))


def _figure(base: Record, event: Mapping[str, Any]) -> Record:
    return replace(
        base,
        workload=event["workload"],
        metric=event["name"],
        value=event["value"],
        unit=event["unit"],
        better=event.get("better", "lower"),
        samples=tuple(event.get("samples") or (event["value"],)),
    )


def _asked(job: Job) -> dict[str, Any]:
    """Return the options that change a figure, without empty ones."""
    loaded = {name: value for name, value in asdict(job.options).items() if value not in ("auto", 0, False, {})}
    sizes = {"scale": job.size.scale} if job.size.scale != 1 else {}
    adapters = {name: value for name, value in (job.adapters or {}).items() if name != "folders"}
    return {**loaded, **sizes, **(job.throughput or {}), **(job.latency or {}), **adapters}


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is being done: beside a clock on a terminal, and elsewhere as a line for
    each."""
    if not sys.stderr.isatty():
        told: list[str] = []

        def tell(text: str) -> None:
            if told[-1:] != [text]:
                told.append(text)
                print(f"ridgeline: {text}", file=sys.stderr, flush=True)

        yield tell
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda text: bar.update(task, description=text)
