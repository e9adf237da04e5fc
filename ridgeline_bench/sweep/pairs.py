"""What the tuner and the check run: an op on one case, with the ways to run it, measured by the means of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.kernels.base.case import Cuts, OpCase, Tuning
from ridgeline.kernels.ops import OPS
from ridgeline.perf.search import Found, Search, SearchSettings, Timer, Unfit
from ridgeline_bench.machine.timing import device_seconds
from ridgeline_bench.sweep.of_op import OpSweep, tokens_of
from ridgeline_bench.sweep.options import SweepOptions
from ridgeline_bench.sweep.sweep import Job

DEVICE = "cuda"
SHORTEST = 3e-6  # seconds of a launch behind another, however little it moves
TIMED = 2e-3  # seconds of the launches of one timing, at least


@dataclass(frozen=True)
class Pair:
    """An op and a case of it."""

    op: str
    case: OpCase

    def __str__(self) -> str:
        return f"{self.op} {self.case.label} {self.case.form}".rstrip()

    @property
    def cuts(self) -> Cuts:
        cuts = OPS[self.op].cuts()
        assert cuts is not None
        return cuts

    @property
    def tuning(self) -> Tuning:
        assert self.cuts.tuning is not None
        return self.cuts.tuning

    def sweep(self, device: str, *, dry: bool = False) -> OpSweep:
        """Return the sweep of this op, with this case alone."""
        sweep = OpSweep(SweepOptions(name=self.op, dry=dry), device)
        sweep.real_cases = {self.case.label: self.case}
        return sweep

    def job(self, cut: Any) -> Job:
        """Return the job of a cut; None: what the platform gets."""
        return Job(self.case.label, self.op, tokens_of(self.case), self.case.form, cut, chosen=cut is None)

    def jobs(self) -> list[Job]:
        """Return the jobs of all cuts that can be kept."""
        return [self.job(cut) for cut in self.cuts.candidates(self.case) if isinstance(cut, self.tuning.kinds)]


def tuned_pairs(only: tuple[str, ...] = (), case: str = "") -> list[Pair]:
    """Return the pairs of op and shape class that are tuned, of all ops or of some; case: a part of their labels."""
    return [
        Pair(name, one)
        for name, op in OPS.items()
        if (not only or name in only) and (cuts := op.cuts()) is not None and cuts.tuning is not None
        for one in cuts.tuning.classes
        if case in one.label and len(Pair(name, one).jobs()) > 1
    ]


def search_of(pair: Pair, prepare: Callable[[Job], Timer], settings: SearchSettings) -> Search[Job]:
    """Return the search for the fastest cut of a pair. Without a model the order of the cuts is that of the trials."""
    order = {job: float(i) for i, job in enumerate(pair.jobs(), 1)}

    def cost(job: Job) -> float:
        if job.cut is None:
            return 0.0  # which is measured in any case
        return order[job] if pair.cuts.cost is None else pair.cuts.cost(pair.case, job.cut)

    return Search(cost=cost, prepare=prepare, settings=settings)


def found(pair: Pair, settings: SearchSettings, extra: tuple[Any, ...] = ()) -> tuple[Found[Job], float]:
    """Search the fastest cut of a pair on this GPU, beside what the platform gets and the cuts in `extra`. Return the
    record and the seconds of the machine's limit."""
    with torch.inference_mode():
        sweep = pair.sweep(DEVICE)
        own = pair.job(None)
        calls = sweep.arguments(own)
        limit = sweep.limit(own, calls)
        always = [own, *(pair.job(cut) for cut in extra)]
        search = search_of(pair, _Prepared(sweep, calls, limit.seconds), settings)
        return search.run(pair.jobs(), always), limit.seconds


class _Prepared:
    """Checks a job and captures its launches. Errors of a cut are its own unless the device is broken."""

    def __init__(self, sweep: OpSweep, calls: list[Any], least: float) -> None:
        self._sweep, self._calls, self._least = sweep, calls, max(least, SHORTEST)

    def __call__(self, job: Job) -> Timer:
        try:
            self._sweep.check(job, self._calls[0])
            graph, launches = self._sweep.captured(job, self._calls, self._least)
            times = max(1, round(TIMED / device_seconds(graph.replay)))
        except Exception as error:
            torch.cuda.synchronize()  # raises what broke the device, which no other cut survives
            raise Unfit(f"{type(error).__name__}: {error}"[:300]) from error
        return lambda: device_seconds(graph.replay, times) / launches


def dealt(pairs: list[Pair]) -> Iterator[Pair]:
    """Yield pairs in turns of their ops, so that a run that ends early has some of each."""
    by_op: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_op.setdefault(pair.op, []).append(pair)
    rows = [list(reversed(some)) for some in by_op.values()]
    while rows := [row for row in rows if row]:
        yield from (row.pop() for row in rows)
