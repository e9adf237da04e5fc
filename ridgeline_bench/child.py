"""The measuring process: `python -m ridgeline_bench.child JOB` loads one engine and runs it, speaking JSON lines.

JOB is a JSON object (see `runner.Job`). Every line on standard output is one event: ready, first, phase, metric, skip,
done or error. Output of the engines goes to standard error. This process imports nothing of ours but the job's engine,
so a peer may run in an environment of its own.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from ridgeline.core.errors import RidgelineError
from ridgeline_bench.engines import ENGINES, Engine, LoadOptions
from ridgeline_bench.workloads import Phase, Size, Workload, decoded, uniform, warm_up, workloads

Say = Callable[..., None]


def main() -> None:
    job = json.loads(sys.argv[1])
    say = _speaker()
    try:
        run(job, say)
    except RidgelineError as error:
        say("error", message=str(error), code=2)
    except Exception as error:
        say(
            "error",
            message=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}",
            code=1,
        )
        raise
    say("done")


def run(job: dict[str, Any], say: Say) -> None:
    """Load the engine, report when it is ready and when it gave the first tokens, then do the job's task."""
    kind: type[Engine] = ENGINES[job["engine"]]
    if job["only_check"]:
        return kind.check(job["model"])
    size = Size(**job["size"])
    engine: Engine = kind(job["model"], LoadOptions(**job["options"]))  # type: ignore[call-arg]
    synchronize()
    say("ready", seconds=time.monotonic() - job["spawned"], **_versions(engine))
    timed(engine, warm_up(size))
    say("first", seconds=time.monotonic() - job["spawned"])
    for workload in _tasks(job, size):
        longest = job["options"].get("max_model_len") or workload.longest
        if workload.longest > longest:
            say("skip", workload=workload.name, why=f"needs {workload.longest} tokens of context, there are {longest}")
            continue
        measure(engine, workload, say)
    if latency := job.get("latency"):
        _latency(engine, size, latency, say)
    if trace := job.get("trace"):
        _trace(engine, size, trace, say)
    engine.close()


def _tasks(job: dict[str, Any], size: Size) -> Iterator[Workload]:
    if job.get("workloads") is not None:
        yield from workloads(job["workloads"], size)
    if uniformly := job.get("throughput"):
        yield uniform(size=size, **uniformly)


def measure(engine: Engine, workload: Workload, say: Say) -> None:
    """Run one workload's phases in order and report its metrics. On a CPU the same metrics follow of the time that all
    cores gave to this process, because that of a clock is also the neighbours'."""
    say("workload", workload=workload.name)
    times, given = {}, {}
    for phase in workload.phases:
        before = time.process_time()
        times[phase.name] = timed(engine, phase)
        given[phase.name] = time.process_time() - before
        say("phase", workload=workload.name, phase=phase.name, seconds=times[phase.name])
    for metric in workload.metrics(times):
        say("metric", workload=workload.name, **metric._asdict())
    for metric in workload.metrics(given) if not _gpu() else ():
        say("metric", workload=workload.name, **metric._replace(name=f"{metric.name}, processor")._asdict())


def timed(engine: Engine, phase: Phase) -> float:
    """Return the seconds of one phase. Raise RuntimeError if a request did not get all its tokens, because that is no
    measurement."""
    synchronize()
    started = time.perf_counter()
    counts = engine.generate(phase.prompts, phase.max_tokens, phase.temperature)
    synchronize()
    seconds = time.perf_counter() - started
    if list(counts) != list(phase.max_tokens):
        raise RuntimeError(f"phase {phase.name} asked for {sum(phase.max_tokens)} tokens and got {sum(counts)}.")
    return seconds


def _latency(engine: Engine, size: Size, asked: dict[str, int], say: Say) -> None:
    """Run single requests, one after the other, and report the milliseconds to the first token and between tokens."""
    rng, first, between = random.Random(0), [], []
    for request in range(1 + asked["requests"]):
        prompt = size.tokens(asked["input_len"], rng)
        synchronize()
        arrivals, tokens = [time.perf_counter()], [0]
        for count in engine.stream(prompt, asked["output_len"]):
            arrivals.append(time.perf_counter())
            tokens.append(count)
        if tokens[-1] != asked["output_len"]:
            raise RuntimeError(f"a request asked for {asked['output_len']} tokens and got {tokens[-1]}.")
        if request:  # the first request warms up
            first.append(1e3 * (arrivals[1] - arrivals[0]))
            between += [1e3 * (b - a) for a, b in itertools.pairwise(arrivals[1:])]
            say("phase", workload="latency", phase=f"request {request}", seconds=arrivals[-1] - arrivals[0])
    for name, values in (("ttft", first), ("itl", between)):
        for percent in (50, 90, 99):
            samples = values if percent == 50 else []
            value = percentile(values, percent)
            say("metric", workload="latency", name=f"{name} p{percent}", value=value, unit="ms", samples=samples)


def _trace(engine: Engine, size: Size, asked: dict[str, Any], say: Say) -> None:
    """Time the phases of `decoded`, then trace each twice. No prompt comes twice, so that no cache of prefixes finds
    one."""
    folder = Path(asked["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    works = (decoded(size=size, seed=seed, **asked["shape"]) for seed in itertools.count())

    def anew(place: int) -> float:
        return timed(engine, next(works).phases[place])

    work = next(works)
    say("workload", workload=work.name)
    samples = {phase.name: [anew(place) for _ in range(4)][1:] for place, phase in enumerate(work.phases)}
    for metric in work.metrics({name: sorted(times)[1] for name, times in samples.items()}):
        each = [1e3 * seconds for seconds in samples[metric.name]]
        say("metric", workload=work.name, **metric._replace(samples=tuple(each))._asdict())
    for (place, phase), number in itertools.product(enumerate(work.phases), range(2)):
        engine.trace(functools.partial(anew, place), folder / f"{phase.name}-{number}.json")


def percentile(values: list[float], percent: float) -> float:
    """Return the smallest value that at least `percent` % of the values do not exceed, or 0 if there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else 0.0


def synchronize() -> None:
    """Wait for the GPU, if torch is loaded and uses one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _versions(engine: Engine) -> dict[str, Any]:
    def of(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return ""

    torch = sys.modules.get("torch")
    gpu = _gpu()
    return {
        "version": engine.version,
        "dtype": engine.dtype,
        "torch": str(torch.__version__) if torch is not None else of("torch"),
        "triton": of("triton"),
        "python": platform.python_version(),
        "gpu": gpu,
        "threads": torch.get_num_threads() if torch is not None and not gpu else 0,
    }


def _gpu() -> str:
    """Return the GPU's name, or "" without one."""
    torch = sys.modules.get("torch")
    return str(torch.cuda.get_device_name()) if torch is not None and torch.cuda.is_available() else ""


def _speaker() -> Say:
    """Return the function that writes events to what was standard output. Anything else printed from now on goes to
    standard error."""
    private = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(event: str, **fields: Any) -> None:
        private.write(json.dumps({"event": event, **fields}) + "\n")

    return say


if __name__ == "__main__":
    main()
