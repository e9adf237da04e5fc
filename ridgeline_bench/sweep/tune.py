"""The tuner: of each op and class of shapes the fastest cut on this GPU, for the file that kernels read.

1. A model ranks the cuts of every pair of op and class (perf/search.py). The best eight, and what runs today, stay.
2. Their kernels are compiled in many processes, each kernel once.
3. A child checks and times the cuts of one pair after the other. A pair over which it dies is left out.

The record has a line for each pair, with every cut that was tried and why it lost.
"""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ridgeline.kernels.base import tuned
from ridgeline.kernels.base.aot import compiling_for
from ridgeline.kernels.base.launch import compute_capability, num_multiprocessors, settle_cache_keys
from ridgeline.perf.search import SearchSettings, Timer
from ridgeline_bench.sweep.pairs import Pair, search_of
from ridgeline_bench.sweep.runs import one_child, target
from ridgeline_bench.sweep.sweep import Job

START, SILENCE = 60.0, 40.0  # seconds after which a child that has said nothing, at first and later, hangs
SETTINGS = SearchSettings(seconds=15.0, repeats=6)
Notes = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """The effort of a tuner. seconds: of all, compiling included; 0: no limit. processes: that compile.

    extra: cuts that are measured in a pair besides.
    shipped: what runs without a cut reads the files of tuned cuts; else the ops' own rules decide.
    """

    settings: SearchSettings = SETTINGS
    seconds: float = 0.0
    processes: int = 1
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
    started = time.monotonic()
    kernels, failures = compile_cuts(pairs, options)
    for failure in failures:
        note(failure)
    note(f"{kernels} kernels of {len(pairs)} pairs compiled in {time.monotonic() - started:.0f} s")
    pending = dict(enumerate(pairs))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pending"
        while pending and time.monotonic() < until:
            path.write_bytes(pickle.dumps((pending, options)))
            command = [sys.executable, "-W", "ignore", "-m", "ridgeline_bench.sweep.tune_child", str(path)]
            for answer in one_child(command, len(pending), until, START, SILENCE):
                number = answer.get("number", next(iter(pending), None))
                if number in pending:
                    given = {name: answer[name] for name in ("took", "limit_us", "failed") if name in answer}
                    yield Tuned(pending.pop(number), trials=tuple(answer.get("trials", ())), **given)


def compile_cuts(pairs: Sequence[Pair], options: TuneOptions) -> tuple[int, list[str]]:
    """Compile what the pairs' searches will measure, each kernel once. Return how many were new, and what failed: such
    a cut fails again where it is measured, and is left out there."""
    arch, processors = target()
    jobs = [(pair, job) for pair in pairs for job in leading(pair, options)]
    with tempfile.TemporaryDirectory() as claims, ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        share = max(1, len(jobs) // (8 * options.processes))
        futures = [
            pool.submit(_compile, jobs[i : i + share], arch, processors, Path(claims), options.shipped)
            for i in range(0, len(jobs), share)
        ]
        done, _ = wait(futures)
    found = [future.result() for future in done]
    return sum(fresh for fresh, _ in found), [failure for _, failures in found for failure in failures]


def leading(pair: Pair, options: TuneOptions) -> list[Job]:
    """Return the jobs that a pair's search measures."""
    always = [pair.job(None), *(pair.job(cut) for cut in options.extra_of(pair))]
    return search_of(pair, _never, options.settings).leading(pair.jobs(), always)


def _never(job: Job) -> Timer:
    raise AssertionError


def _compile(
    jobs: list[tuple[Pair, Job]], arch: str, processors: int, claims: Path, shipped: bool
) -> tuple[int, list[str]]:
    """Compile the kernels of some jobs that no other process has claimed."""
    settle_cache_keys()
    if not shipped:
        tuned.ignore()
    failures = []

    def claim(kernel: str) -> bool:
        try:
            (claims / sha256(kernel.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    with compiling_for(arch, processors, claim) as done, torch.inference_mode():
        for pair, job in jobs:
            try:
                pair.sweep("meta").compile(job)
            except Exception as error:
                failures.append(f"not compiled: {job}: {type(error).__name__}: {error}"[:300])
    return len(done.fresh), failures


def gpu_here() -> tuned.Gpu:
    """Return the kind of this machine's first GPU."""
    device = torch.device("cuda", 0)
    return tuned.Gpu(compute_capability(device), num_multiprocessors(device))


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
