"""The tuner: of each op and class of shapes the fastest cut on this GPU, for the file that kernels read.

1. A model ranks the cuts of every pair of op and class (perf/search.py). The best eight, and what runs today, stay.
2. Their kernels are compiled in many processes, each kernel once.
3. A child checks and times the cuts of one pair after the other. A pair over which it dies is left out.

The record has a line for each pair, with every cut that was tried and why it lost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from ridgeline.kernels.base import tuned
from ridgeline.kernels.base.launch import compute_capability, num_multiprocessors
from ridgeline.perf.search import SearchSettings
from ridgeline_bench.sweep.children import Compiled, answers, compiled
from ridgeline_bench.sweep.of_op import unprepared
from ridgeline_bench.sweep.pairs import Pair, found, search_of
from ridgeline_bench.sweep.sweep import Job

SETTINGS = SearchSettings(seconds=15.0, repeats=6)
Notes = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """The effort of a tuner.

    seconds: of all, compiling included; 0: no limit.
    processes: that compile.
    pairs: only so many, drawn by the seed; 0: all.
    extra: cuts that are measured in a pair besides.
    shipped: what runs without a cut reads the files of tuned cuts; else the ops' own rules decide.
    """

    settings: SearchSettings = SETTINGS
    seconds: float = 0.0
    processes: int = 1
    pairs: int = 0
    extra: tuple[tuple[Pair, Any], ...] = ()
    shipped: bool = False

    def extra_of(self, pair: Pair) -> tuple[Any, ...]:
        return tuple(cut for known, cut in self.extra if known == pair)


@dataclass(frozen=True)
class Tuned:
    """The answer for one pair. trials: as `Found.record` says, the fastest first. us: of the fastest, and of what runs
    without it. failed: why there is none."""

    pair: Pair
    took: float = 0.0
    limit_us: float = 0.0
    trials: tuple[dict[str, Any], ...] = ()
    failed: str = ""

    @property
    def best(self) -> dict[str, Any] | None:
        return self.trials[0] if self.trials and self.trials[0]["outcome"] == "won" else None

    @property
    def cut(self) -> dict[str, Any] | None:
        """The fastest cut as a file of tuned cuts has it; None: nothing is faster than what runs without it."""
        return self.best["candidate"] if self.best else None

    @property
    def before_us(self) -> float:
        """The µs of what runs without tuning, 0 if unknown."""
        return next((each.get("us", 0.0) for each in self.trials if each["candidate"] is None), 0.0)

    def kept(self) -> dict[str, Any]:
        """Return the line of a file of tuned cuts."""
        assert self.best is not None
        shape = self.pair.tuning.shape(self.pair.case)
        figures = {"us": self.best["us"], "before_us": self.before_us}
        return {"op": self.pair.op, "form": shape.form, "sizes": list(shape.sizes), "cut": self.cut, **figures}


def tune(pairs: Sequence[Pair], options: TuneOptions, note: Notes = print) -> Iterator[Tuned]:
    """Tune all pairs on this GPU, and yield an answer for each as it is known. note: is told what happens meanwhile."""
    until = time.monotonic() + (options.seconds or float("inf"))
    done = compile_cuts(pairs, options)
    for failure in done.failures:
        note(failure)
    note(f"{done.kernels} kernels of {len(pairs)} pairs compiled in {done.seconds:.0f} s")
    for pair, answer in answers(pairs, partial(answered, options), until):
        given = {name: answer[name] for name in ("took", "limit_us", "failed") if name in answer}
        yield Tuned(pair, trials=tuple(answer.get("trials", ())), **given)


def answered(options: TuneOptions, pair: Pair) -> dict[str, Any]:
    """Search the fastest cut of a pair, in a child, and return what `Tuned` holds."""
    if not options.shipped:
        tuned.ignore()
    started = time.monotonic()
    record, limit = found(pair, options.settings, options.extra_of(pair))
    torch.cuda.empty_cache()
    trials = [
        each for each in record.record(_described) if each["outcome"] != "untried" and each["predicted"] is not None
    ]
    return {"took": time.monotonic() - started, "limit_us": 1e6 * limit, "trials": trials}


def _described(job: Job) -> Any:
    return tuned.described(job.cut)


def compile_cuts(pairs: Sequence[Pair], options: TuneOptions) -> Compiled:
    """Compile what the pairs' searches will measure."""
    tasks = [(pair, job) for pair in pairs for job in leading(pair, options)]
    return compiled(tasks, partial(_launch, options.shipped), options.processes)


def leading(pair: Pair, options: TuneOptions) -> list[Job]:
    """Return the jobs that a pair's search measures."""
    always = [pair.job(None), *(pair.job(cut) for cut in options.extra_of(pair))]
    return search_of(pair, unprepared, options.settings).leading(pair.jobs(), always)


def _launch(shipped: bool, task: tuple[Pair, Job]) -> None:
    if not shipped:
        tuned.ignore()
    pair, job = task
    pair.sweep("meta").compile(job)


def gpu_here() -> tuned.GpuKind:
    """Return the kind of this machine's first GPU."""
    device = torch.device("cuda", 0)
    return tuned.GpuKind(compute_capability(device), num_multiprocessors(device))


def line(answer: Tuned, base: dict[str, Any]) -> dict[str, Any]:
    """Return the result line of a pair."""
    pair, best = answer.pair, answer.best
    figures = {"value": best["us"], "limit": round(answer.limit_us, 3), "before": answer.before_us} if best else {}
    return {
        "engine": "ridgeline", "workload": f"tune:{pair.op}", "model": pair.case.label, "metric": pair.op,
        "format": pair.case.form, "plan": answer.cut, **figures, "unit": "us", "better": "lower",
        "took": round(answer.took, 3), "trials": list(answer.trials),
        **({"failed": answer.failed} if answer.failed else {}), **base,
    }  # fmt: skip


def settings_of(options: TuneOptions) -> str:
    """Return the settings in a result line."""
    return json.dumps(asdict(options.settings))
