"""`ridgeline kernels check`: every implementation of every op against the op's plain reference, on the op's own cases.

The cases are those of tests and sweeps (`cases.py` of an op's folder), and so are the tolerances. Memory shows what a
kernel leaves unwritten, and two launches must give the same bits. On a GPU all kernels are compiled first, in many
processes; a child then checks one case after the other, and one over which it dies fails. On a CPU Triton's kernels
run in its interpreter, each on the case of its op that moves the fewest bytes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.kernels.base.case import OpCase
from ridgeline.kernels.base.op import Implementation, Op, Platform, nowhere, on_gpu
from ridgeline.kernels.ops import OPS
from ridgeline_bench.sweep.children import answers, compiled
from ridgeline_bench.sweep.of_op import OpSweep, tokens_of
from ridgeline_bench.sweep.options import SweepOptions
from ridgeline_bench.sweep.sweep import Job, short

GPU = Platform(device_type="cuda", arch="sm_90")
REFERENCES = ("torch", "reference")  # which have no kernels of ours


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The extent of a check.

    ops: a part of their names. cuts: every cut that a sweep would try, too. every: each so-many-th case alone.
    seconds: of all. processes: that compile.
    """

    ops: str = ""
    cuts: bool = False
    every: int = 1
    seconds: float = 0.0
    processes: int = 1


@dataclass(frozen=True)
class CaseCheck:
    """One case of an op, and the ways to run it: implementations by name, or cuts."""

    op: str
    case: OpCase
    ways: tuple[Any, ...]
    device: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.op} {self.case.label} {self.case.form}".rstrip()

    def sweep(self, device: str) -> OpSweep:
        sweep = OpSweep(SweepOptions(name=self.op), device)
        sweep.small_cases, sweep.dtype = {self.case.label: self.case}, self.dtype
        sweep.functions = {each.name: each.load for each in OPS[self.op].implementations}
        if self.device == "cpu":
            sweep.platform = Platform(device_type="cpu")
        return sweep

    def job(self, way: Any) -> Job:
        return Job(self.case.label, self.op, tokens_of(self.case), self.case.form, way, timed=False)


@dataclass(frozen=True)
class Checked:
    """What came of a way to run a case. error: the largest one in units of what is allowed. failed: "" if right."""

    op: str
    case: str
    way: str
    error: float = 0.0
    failed: str = ""


def cases_to_check(options: CheckOptions, device: str) -> list[CaseCheck]:
    """Return all cases with their ways on a device; "cpu" with Triton's interpreter if TRITON_INTERPRET is set."""
    found = list[CaseCheck]()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for name, op in OPS.items():
        cases = [case for case in op.cases().small if case.checked]
        if options.ops not in name or not cases:
            continue
        known = op.cuts() if options.cuts and device == "cuda" else None
        ways, fewest = _ways(op, device), min(cases, key=lambda case: case.cost(4).bytes)
        for case in cases:
            names = tuple(way.name for way in ways if case is fewest or not _interpreted(way, device))
            cuts = tuple(known.candidates(case)) if known is not None else ()
            if names or cuts:
                found.append(CaseCheck(name, case, (*names, *cuts), device, dtype))
    return found[:: options.every]


def _ways(op: Op[Any], device: str) -> list[Implementation]:
    here = Platform.of(torch.device(device))
    found = [each for each in op.implementations if each.supports(here) or each.supports is nowhere]
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        found += [each for each in op.implementations if _interpreted(each, device) and each not in found]
    return found


def _interpreted(way: Implementation, device: str) -> bool:
    return device == "cpu" and way.supports in (on_gpu, nowhere)


def check(checks: Sequence[CaseCheck], options: CheckOptions, note: Callable[[str], object]) -> Iterator[Checked]:
    """Check all cases, and yield an answer for each way as it is known. note: is told what happens meanwhile."""
    until = time.monotonic() + (options.seconds or float("inf"))
    if checks and checks[0].device == "cuda":
        launches = [(one, way) for one in checks for way in one.ways if way not in REFERENCES]
        done = compiled(launches, _launch, options.processes)
        note(f"{done.kernels} kernels of {len(launches)} launches compiled in {done.seconds:.0f} s")
    for one, answer in answers(checks, answered, until):
        if "failed" in answer:
            yield from (Checked(one.op, one.case.label, short(way), failed=answer["failed"]) for way in one.ways)
        for way, error, failed in answer.get("ways", ()):
            yield Checked(one.op, one.case.label, way, error or 0.0, failed)


def _launch(task: tuple[CaseCheck, Any]) -> None:
    one, way = task
    one.sweep("meta").compile(one.job(way))


def answered(one: CaseCheck) -> dict[str, Any]:
    """Check a case in a child. An error of the device, after which nothing works, is raised."""
    with torch.inference_mode():
        sweep = one.sweep(one.device)
        given = sweep.arguments(one.job(None))[0]
        return {"ways": [(short(way), *_outcome(sweep, one.job(way), given)) for way in one.ways]}


def _outcome(sweep: OpSweep, job: Job, given: Any) -> tuple[float | None, str]:
    try:
        return sweep.check(job, given), ""
    except Exception as error:
        if sweep.device.type == "cuda":
            torch.cuda.synchronize()  # raises what broke the device
        return None, str(error)[:300] if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"[:300]
