"""Runs of sweeps: kernels are compiled, children check and time them, a table and result lines are written.

1. Kernels are compiled in many processes, on tensors that have no memory.
2. A child checks and times one cut after the other. If it fails, dies or says nothing for a while, it is ended, what it
   was doing is noted, and another one goes on behind that, without the cuts that are like the broken one.
3. When all is done, or `--seconds` have passed since the start, the table is printed: of each case the fastest cut with
   the machine's limit, then the others. `--json` adds a line for each figure as soon as it is known, in the form of
   benchmarks/results.

`--compile-only` ends after the first part, which needs no GPU. `--dry` walks all jobs with small shapes on a CPU: it
makes inputs and references, launches in Triton's interpreter what that can run, and invents the times.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base.aot import compiling_for
from ridgeline.kernels.base.launch import settle_cache_keys
from ridgeline_bench.results import host_with
from ridgeline_bench.sweep.options import SweepOptions
from ridgeline_bench.sweep.sweep import Job, Sweep, chosen_jobs, fields_of, short


def target() -> tuple[str, int]:
    """Return the architecture to compile for, and its multiprocessors."""
    if not torch.cuda.is_available():
        return "sm_90", 132
    facts = torch.cuda.get_device_properties(0)
    arch = facts.gcnArchName.partition(":")[0] if torch.version.hip else f"sm_{facts.major}{facts.minor}"
    return arch, facts.multi_processor_count


def compile_one(task: tuple[type[Sweep], SweepOptions, str, int, Job]) -> str:
    """Compile what a job launches, and return what went wrong."""
    kind, options, arch, multiprocessors, job = task
    settle_cache_keys()
    try:
        with compiling_for(arch, multiprocessors), torch.inference_mode():
            kind(options, "meta").compile(job)
    except Exception as error:
        return f"NOT COMPILED {job}: {type(error).__name__}: {error}"[:1000]
    return ""


def compile_all(sweep: Sweep, jobs: list[Job], until: float) -> None:
    """Compile what can be compiled until then; the child compiles the rest."""
    started, unlike = time.monotonic(), dict[Any, Job]()
    for job in jobs:
        if sweep.compiles(job):
            unlike.setdefault((job.case, job.op, job.form, job.cut, job.tokens if job.cut is None else 0), job)
    options = sweep.options
    tasks = [(type(sweep), options, *target(), job) for job in unlike.values()]
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        futures = [pool.submit(compile_one, task) for task in tasks]
        done, rest = wait(futures, timeout=None if options.compile_only else max(0.0, until - time.monotonic()))
        pool.shutdown(wait=False, cancel_futures=True)
    for future in done:
        if message := future.result():
            print(message)
    took = time.monotonic() - started
    print(f"{len(done)} of {len(done) + len(rest)} launches compiled in {took:.0f} s", flush=True)


# The parent that watches its children


def work(sweep: Sweep, jobs: list[Job], until: float) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Have all jobs done by children, one after the other, and yield their answers. Cuts that were wrong in a case are
    not timed there, and cuts like one that broke are not launched at all."""
    pending, kind = dict(enumerate(jobs)), type(sweep)
    asked = {"kind": f"{kind.__module__}:{kind.__qualname__}", "options": asdict(sweep.options)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pending.json"
        while pending and time.monotonic() < until:
            path.write_text(json.dumps(asked | {"jobs": list(pending)}))
            command = [sys.executable, "-W", "ignore", "-m", "ridgeline_bench.sweep.child", str(path)]
            for answer in one_child(command, len(pending), until, sweep.start, sweep.silence):
                number = answer.pop("number", next(iter(pending), None))
                if number not in pending:
                    continue  # left out as below
                job = pending.pop(number)
                yield job, answer
                if "broken" in answer:
                    pending = {i: one for i, one in pending.items() if not sweep.alike(job, one)}
                elif "failed" in answer:
                    pending = {i: one for i, one in pending.items() if not one.is_again(job)}


def one_child(command: list[str], number: int, until: float, start: float, silence: float) -> Iterator[dict[str, Any]]:
    """Yield the answers of a child. The last one has no number if the child hung or died over the next job."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    reader = selectors.DefaultSelector()
    reader.register(process.stdout, selectors.EVENT_READ)
    rest, patience, heard = b"", start, time.monotonic()
    while number and (now := time.monotonic()) < until:
        if not reader.select(min(heard + patience, until) - now):
            if time.monotonic() < until:
                yield {"failed": f"no answer in {patience:.0f} s", "broken": True}
            break
        data = os.read(process.stdout.fileno(), 1 << 16)
        if not data:
            yield {"failed": "the child died", "broken": True}
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b'{"number"'):
                number, patience, heard = number - 1, silence, time.monotonic()
                answer = json.loads(line)
                yield answer
                if "broken" in answer:
                    number = 0
    process.kill()
    process.stdout.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        print("A child does not end: the device may need a reset.", flush=True)


# Results


def show(answers: dict[Job, dict[str, Any]]) -> None:
    """Print how many cuts were right, then of each case the fastest one and the others behind it. A star marks the one
    that would be chosen."""
    right = {job: answer for job, answer in answers.items() if "failed" not in answer}
    errors = [answer["error"] for answer in right.values() if answer["error"] is not None]
    print(f"{len(right)} of {len(answers)} right, largest error {max(errors, default=0):.4f}")
    cases: dict[tuple[Any, ...], list[tuple[float, Job]]] = {}
    for job, answer in right.items():
        if job.timed:
            cases.setdefault(job.setting, []).append((answer["us"], job))
    for rows in cases.values():
        (us, job), *behind = sorted(rows, key=lambda row: row[0])
        answer = right[job]
        facts = [f"{answer['flops'] / us / 1e6:6.0f} TFLOP/s", answer["note"]]
        facts += [f"e{answer['error']:.4f}"] if answer["error"] is not None else []
        others = "  ".join(f"{named(one)} {took:.2f}" for took, one in behind)
        least = answer["limit_us"]
        print(
            f"{job.case:14s} {job.op:11s} {job.form:8s} T {job.tokens:5d} {us:9.2f} µs of {least:8.2f} "
            f"({100 * least / us:4.1f} %) {' '.join(filter(None, facts))} {named(job)} | {others}"
        )


def named(job: Job) -> str:
    return short(job.cut) + "*" * job.chosen


def line(sweep: Sweep, job: Job, answer: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Return the result line of a figure or a failure."""
    names = {"us": "value", "limit_us": "limit"}
    figure = {name: float(f"{answer[key]:.4g}") for key, name in names.items() if key in answer}
    facts = {name: answer[name] for name in ("error", "failed", "note") if answer.get(name)}
    return {
        "engine": "ridgeline", "workload": sweep.workload, "model": job.case, "metric": job.op, "format": job.form,
        "tokens": job.tokens, "kernel": type(job.cut).__name__.lower() if job.ours else "",
        "plan": fields_of(job.cut) if job.ours else job.cut, "chosen": job.chosen, **figure,
        "unit": "us", "better": "lower", **facts, **base,
    }  # fmt: skip


def run(kind: type[Sweep], options: SweepOptions, results: Path | None = None, commit: str = "") -> None:
    """Do what the options ask for, print the table, and add result lines to a file.

    Raises InvalidConfig if that takes a GPU and there is none.
    """
    if not (options.dry or options.compile_only or torch.cuda.is_available()):
        raise InvalidConfig("there is no GPU here; use --compile-only or --dry, which need none.")
    sweep = kind(options, "cpu" if options.dry else "cuda")
    started, seconds = time.monotonic(), options.seconds or kind.seconds
    machine = asdict(host_with(torch.device("cuda" if torch.cuda.is_available() else "cpu"), commit))
    base: dict[str, Any] = {"machine": machine, "date": datetime.now(UTC).date().isoformat()}
    base |= {"command": f"ridgeline bench sweep {options.name}", **({"dry": True} if options.dry else {})}
    print(" · ".join(f"{name} {value}" for name, value in (machine | {"date": base["date"]}).items() if value))
    jobs, answers, until = chosen_jobs(sweep), dict[Job, dict[str, Any]](), started + seconds
    if not options.dry:
        compile_all(sweep, jobs, started + 0.6 * seconds)
    if options.compile_only:
        return
    for job, answer in ((j, sweep.answer(j)) for j in jobs) if options.dry else work(sweep, jobs, until):
        answers[job] = answer
        if "failed" in answer:
            print(f"FAILED {job}: {answer['failed']}", flush=True)
        if results and (job.timed or "failed" in answer):
            with results.open("a") as file:
                file.write(json.dumps(line(sweep, job, answer, base), ensure_ascii=False) + "\n")
    show(answers)
    print(f"{len(answers)} of {len(jobs)} jobs in {time.monotonic() - started:.0f} s")
