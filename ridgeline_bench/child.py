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
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, cast

from ridgeline.core.errors import RidgelineError
from ridgeline_bench import adapters
from ridgeline_bench.engines import ENGINES, AdapterEngine, Engine, LoadOptions
from ridgeline_bench.workloads import PROCESSOR, Phase, Size, Workload, decoded, uniform, warm_up, workloads

Say = Callable[..., None]

TOUCHED_STEPS = 8  # that are run once more to count experts


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
    alone = not any(job.get(task) for task in ("workloads", "throughput", "latency", "adapters", "trace"))
    stages = getattr(engine, "stages", {}) if alone else {}
    say("ready", seconds=time.monotonic() - job["spawned"], stages=stages, **_versions(engine))
    timed(engine, warm_up(size))
    say("first", seconds=time.monotonic() - job["spawned"])
    if (settle := getattr(engine, "settle", None)) is not None:
        settle()
    for workload in _tasks(job, size):
        longest = job["options"].get("max_model_len") or workload.longest
        if workload.longest > longest:
            say("skip", workload=workload.name, why=f"needs {workload.longest} tokens of context, there are {longest}")
            continue
        measure(engine, workload, say)
    if latency := job.get("latency"):
        _latency(engine, size, latency, say)
    if asked := job.get("adapters"):
        for metric in adapters.measured(cast("AdapterEngine", engine), size, asked, synchronize):
            say("metric", workload="adapters", **metric._asdict())
    if trace := job.get("trace"):
        _trace(engine, size, trace, say)
    engine.close()


def _tasks(job: dict[str, Any], size: Size) -> Iterator[Workload]:
    if job.get("workloads") is not None:
        yield from workloads(job["workloads"], size)
    if uniformly := job.get("throughput"):
        yield uniform(size=size, **uniformly)


class Spent(NamedTuple):
    """The seconds of a phase: by the clock, and what all cores gave to this process."""

    clock: float
    processor: float


def measure(engine: Engine, workload: Workload, say: Say) -> None:
    """Run one workload's phases in order and report its metrics."""
    say("workload", workload=workload.name)
    spent = {}
    for phase in workload.phases:
        spent[phase.name] = timed(engine, phase)
        say("phase", workload=workload.name, phase=phase.name, seconds=spent[phase.name].clock)
    _touched(engine, workload, say)
    _report(workload, spent, say)


def _touched(engine: Engine, workload: Workload, say: Say) -> None:
    """Report the experts that the decode steps of a workload reached, before its figures: routing decides what these
    may be, and that of made weights may leave experts out."""
    look = getattr(engine, "touched", None)
    steps = [phase for phase in workload.phases if min(phase.max_tokens) > 1]
    if look is None or not 0 < len(steps) < len(workload.phases):
        return
    if (found := look(steps[-1].prompts, TOUCHED_STEPS)) is not None:
        value, experts = found
        say(
            "metric",
            workload=workload.name,
            name="experts touched",
            value=value,
            unit=f"of {experts}",
            better="neither",
        )


def _report(workload: Workload, spent: Mapping[str, Spent], say: Say) -> None:
    """Report a workload's metrics. On a CPU they also follow of the processor's time, because that of the clock is also
    the neighbours'."""
    for metric in workload.metrics({name: seconds.clock for name, seconds in spent.items()}):
        say("metric", workload=workload.name, **metric._asdict())
    if _gpu():
        return
    for metric in workload.metrics({name: seconds.processor for name, seconds in spent.items()}):
        say("metric", workload=workload.name, **metric._replace(name=metric.name + PROCESSOR)._asdict())


def timed(engine: Engine, phase: Phase) -> Spent:
    """Run one phase. Raise RuntimeError if a request did not get all its tokens, because that is no measurement."""
    synchronize()
    started, given = time.perf_counter(), time.process_time()
    counts = engine.generate(phase.prompts, phase.max_tokens, phase.temperature)
    synchronize()
    spent = Spent(time.perf_counter() - started, time.process_time() - given)
    if list(counts) != list(phase.max_tokens):
        raise RuntimeError(f"phase {phase.name} asked for {sum(phase.max_tokens)} tokens and got {sum(counts)}.")
    return spent


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

    def anew(place: int) -> Spent:
        return timed(engine, next(works).phases[place])

    work = next(works)
    say("workload", workload=work.name)
    runs = {phase.name: [anew(place) for _ in range(4)][1:] for place, phase in enumerate(work.phases)}
    _report(
        work, {name: Spent(*(sorted(times)[1] for times in zip(*run, strict=True))) for name, run in runs.items()}, say
    )
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
