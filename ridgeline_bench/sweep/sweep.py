"""Sweeps over cuts of GPU kernels: what there is to do, and how one cut is checked and timed.

A sweep is a subclass of `Sweep`; runs.py runs it, and says how. That of an op is made from the op (of_op.py).

A cut is checked with memory that shows what a kernel leaves unwritten, and two launches must agree. One that is right
is timed in a captured graph whose launches take several weights in turn, so that none is found in the second-level
cache.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ridgeline_bench.machine.timing import device_seconds
from ridgeline_bench.sweep.options import SweepOptions

UNCACHED = 200e6  # bytes of the weights that take turns, several times the second-level cache


@dataclass(frozen=True)
class Job:
    """One cut of one case.

    case: the name of a shape. op: what is launched. form: the format of weights or caches.
    cut: the plan of a kernel of ours, a frozen dataclass or named tuple; a word for what has no cut; None for what is
        chosen by itself.
    chosen: this cut is the one that would be chosen.
    timed: False if it is only checked.
    """

    case: str
    op: str
    tokens: int
    form: str = ""
    cut: Any = None
    chosen: bool = False
    timed: bool = True

    @property
    def setting(self) -> tuple[Any, ...]:
        """All but the cut."""
        return self.case, self.op, self.tokens, self.form, self.timed

    def is_again(self, other: Job) -> bool:
        """Return True if this is the same cut of ours in the same case, for as many tokens or others."""
        names = ("case", "op", "form", "cut")
        return self.ours and all(getattr(self, name) == getattr(other, name) for name in names)

    @property
    def ours(self) -> bool:
        return is_dataclass(self.cut) or hasattr(self.cut, "_asdict")

    def __str__(self) -> str:
        return f"{self.case} {self.op} {self.form} T {self.tokens} {short(self.cut)}"


@dataclass(frozen=True)
class Limit:
    """The least seconds of a launch by the machine's rates, and its FLOPs."""

    seconds: float
    flops: float
    note: str = ""


class Sweep(ABC):
    """Cases and cuts of some kernels. A sweep lives in the parent, in the child that measures, and in processes that
    compile, where its device is "meta" and tensors have no memory.

    workload: its name in result lines.
    bandwidth, peak: bytes and FLOPs a second at the most.
    start, silence: seconds after which a child that has said nothing, at first and later, is taken for hung.
    """

    workload = ""
    seconds = 100.0
    bandwidth, peak = 4.42e12, 750e12  # what an H200 attains
    start, silence = 60.0, 20.0

    def __init__(self, options: SweepOptions, device: str) -> None:
        self.options, self.device, self.dry = options, torch.device(device), options.dry
        self.bandwidth = options.bandwidth or self.bandwidth
        self.dtype = torch.float16 if self.dry else torch.bfloat16  # the interpreter cannot multiply bfloat16
        self._kept: dict[str, tuple[Any, Any]] = {}
        self._interpreted: set[Any] = set()

    @abstractmethod
    def jobs(self) -> list[Job]:
        """Return all jobs, those that matter most first; the same ones in every process."""

    @abstractmethod
    def arguments(self, job: Job) -> list[Any]:
        """Return the arguments of the launches that take turns, on `self.device`. They do not depend on the cut."""

    @abstractmethod
    def launch(self, job: Job, arguments: Any) -> Any:
        """Launch the op, and return its tensor, or a tuple of tensors."""

    @abstractmethod
    def reference(self, job: Job, arguments: Any) -> Any:
        """Return the right result of `launch`, or None if other jobs check the cut."""

    @abstractmethod
    def limit(self, job: Job, calls: list[Any]) -> Limit: ...

    def error(self, job: Job, got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
        """Return the largest error in units of the allowed one; NaN is wrong too."""
        raise NotImplementedError

    def defined(self, job: Job, arguments: Any, result: Any) -> Any:
        """Return the part of a result that has a meaning, in memory that the next launch does not write to."""
        return result

    def interpreted(self, job: Job) -> Any:
        """Return the kind of a job that Triton's interpreter can run, or None. A dry run launches one of each kind."""
        return None

    def compiles(self, job: Job) -> bool:
        """Return True if a job's kernels are compiled ahead of its launch."""
        return not isinstance(job.cut, str)

    def alike(self, a: Job, b: Job) -> bool:
        """Return True if two jobs launch nearly the same kernel, so that both break if one does."""
        return a.ours and b.ours and (a.op, a.form, unstaged(a.cut)) == (b.op, b.form, unstaged(b.cut))

    # What subclasses build on

    def turns(self, nbytes: float, most: int = 64) -> int:
        """Return the number of weights of `nbytes` that take turns, so that the second-level cache holds none of
        them."""
        return 1 if self.device.type != "cuda" else min(most, max(2, -int(-UNCACHED // nbytes)))

    def kept(self, name: str, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value that was made for the key, or make it. One value is kept for each name."""
        if name not in self._kept or self._kept[name][0] != key:
            self._kept.pop(name, None)
            self._kept[name] = key, make()
        return self._kept[name][1]

    # What runs elsewhere

    def compile(self, job: Job) -> None:
        self.launch(job, self.arguments(job)[0])

    def answer(self, job: Job) -> dict[str, Any]:
        """Check a cut, and time it if it is right. Raises AssertionError if it is wrong."""
        with torch.inference_mode():
            if "calls" in self._kept and self._kept["calls"][0] != job.setting:
                self._kept.pop("calls")
                self._kept.pop("reference", None)
                torch.cuda.empty_cache()
            calls = self.kept("calls", job.setting, lambda: self.arguments(job))
            found: dict[str, Any] = {"error": self.check(job, calls[0])}
            if job.timed:
                limit = self.limit(job, calls)
                us = 1e6 * (2 * limit.seconds if self.dry else self.time(job, calls, limit.seconds))
                found |= {"us": us, "limit_us": 1e6 * limit.seconds, "flops": limit.flops, "note": limit.note}
        return found

    def check(self, job: Job, arguments: Any) -> float | None:
        want = self.kept("reference", job.setting, lambda: self.reference(job, arguments))
        if want is None:
            return None
        take = partial(self.defined, job, arguments)
        if self.dry and not self._can_launch(job):
            found = [take(want), take(want)]
        else:
            with spoiled_memory():
                found = [take(self.launch(job, arguments)) for _ in range(2)]
        results = [tensors(x) for x in (*found, take(want))]
        for a, b in zip(*results[:2], strict=True):
            assert torch.equal(a.float().nan_to_num(1e9), b.float().nan_to_num(1e9)), "two launches differ"
        error = self.error(job, results[0], results[2])
        assert error <= 1, f"error {error}"
        return error

    def _can_launch(self, job: Job) -> bool:
        kind = self.interpreted(job) if os.environ.get("TRITON_INTERPRET") == "1" else None
        new = kind is not None and kind not in self._interpreted
        self._interpreted.add(kind)
        return new

    def time(self, job: Job, calls: list[Any], least: float) -> float:
        """Return the seconds of one launch, in a captured graph: the best of three."""
        graph, launches = self.captured(job, calls, least)
        took, best = device_seconds(graph.replay), float("inf")
        for _ in range(3):
            best = min(best, device_seconds(graph.replay, max(1, round(8e-3 / took))))
        return best / launches

    def captured(self, job: Job, calls: list[Any], least: float) -> tuple[torch.cuda.CUDAGraph, int]:
        """Return a graph of launches that take about a millisecond or more, and their number."""
        launches = len(calls) * max(1, round(1e-3 / (least * len(calls))))
        for each in calls:  # peers plan for arguments once, on the host, and no graph can hold that
            self.launch(job, each)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(launches):
                self.launch(job, calls[i % len(calls)])
        return graph, launches


@contextmanager
def spoiled_memory() -> Iterator[None]:
    """Give kernels memory that shows what they leave unwritten."""
    empty = torch.empty

    def spoiled(*shape: Any, **options: Any) -> Tensor:
        fresh = empty(*shape, **options)
        return fresh.fill_(torch.nan) if fresh.is_floating_point() and fresh.itemsize > 1 else fresh.zero_()

    with patch.object(torch, "empty", spoiled):
        yield


def tensors(result: Any) -> list[Tensor]:
    """Return the tensors of a result, however nested."""
    if isinstance(result, tuple):
        return [x for part in result for x in tensors(part)]
    if is_dataclass(result) and not isinstance(result, type):
        return tensors(tuple(getattr(result, each.name) for each in fields(result)))
    return [result] if isinstance(result, Tensor) else []


def moved(value: Any, device: torch.device) -> Any:
    """Return copies of all tensors in a value on a device, however nested."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, list | tuple):
        items = [moved(x, device) for x in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: moved(x, device) for key, x in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: moved(getattr(value, each.name), device) for each in fields(value)})
    return value


def fields_of(cut: Any) -> dict[str, Any]:
    return asdict(cut) if is_dataclass(cut) and not isinstance(cut, type) else dict(cut._asdict())


def unstaged(cut: Any) -> Any:
    """Return a cut whose number of stages does not count."""
    if not hasattr(cut, "stages"):
        return cut
    return replace(cut, stages=0) if is_dataclass(cut) and not isinstance(cut, type) else cut._replace(stages=0)


def short(cut: Any) -> str:
    if cut is None or isinstance(cut, str):
        return cut or "by itself"
    return type(cut).__name__.lower() + "/".join(
        str(int(v) if isinstance(v, bool) else v) for v in fields_of(cut).values()
    )


def chosen_jobs(sweep: Sweep) -> list[Job]:
    """Return the jobs that the options ask for."""
    options = sweep.options
    wanted = [(getattr(options, name), name) for name in ("case", "tokens", "form")]
    every = dict[Any, Job]()
    for job in sweep.jobs():
        every.setdefault((*job.setting, job.cut), job)
    found = [job for job in every.values() if all(not some or getattr(job, name) in some for some, name in wanted)]
    return [job for job in found if not options.chosen or job.chosen or not job.ours]
