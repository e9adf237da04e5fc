"""Times of every implementation of every op on its cases. One that fails the check against the reference gets no
speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base.case import OpCase
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.base.op import Implementation, Op, Platform
from ridgeline.kernels.ops import OPS
from ridgeline.perf.hardware import Hardware
from ridgeline_bench.machine.probes import Bench
from ridgeline_bench.profile.ops import Recorded
from ridgeline_bench.results import Record


@dataclass(frozen=True)
class Subject:
    """One op on one case."""

    op: Op[Any]
    case: OpCase


def subjects(*, real: bool = False) -> Iterator[Subject]:
    """Yield the ops' own cases, each followed by those of real models if wanted."""
    for op in OPS.values():
        cases = op.cases()
        yield from (Subject(op, case) for case in (*cases.small, *(cases.real if real else ())))


@dataclass(frozen=True)
class Timing:
    """One implementation on one case. `seconds` is the median of one call. If the result is wrong, it is 0 and `error`
    says how."""

    subject: Subject
    implementation: str
    seconds: float
    error: str = ""

    def record(self, base: Record, itemsize: int, hardware: Hardware | None) -> Record:
        """Return the timing as a result in µs, with the rates reached and its place on the roofline."""
        cost = self.subject.case.cost(itemsize)
        roof = {"bandwidth": hardware.bandwidth, "peak": hardware.matrix.get(base.dtype, 0.0)} if hardware else {}
        limit = kernel_limit(self.subject.op, cost, hardware, base.dtype)
        return Record(
            engine=base.engine,
            version=base.version,
            dtype=base.dtype,
            machine=base.machine,
            date=base.date,
            workload=f"kernel:{self.subject.op.name}",
            metric=f"{self.subject.case.label} [{self.implementation}]",
            value=1e6 * self.seconds,
            unit="µs",
            limit=1e6 * limit,
            samples=(1e6 * self.seconds,),
            options={"bytes": cost.bytes, "flops": cost.flops, **roof},
        )


def kernel_limit(op: Op[Any], cost: Cost, hardware: Hardware | None, dtype: str) -> float:
    """Return the least possible seconds, or 0 if the hardware, or its matrix rate in this dtype, is unknown."""
    if hardware is None:
        return 0.0
    if not op.matrix:
        return cost.bytes / hardware.bandwidth
    if dtype not in hardware.matrix:
        return 0.0
    return max(cost.bytes / hardware.bandwidth, cost.flops / hardware.matrix[dtype])


def time_kernels(subjects: Iterator[Subject], dtype: torch.dtype, bench: Bench, only: str = "") -> Iterator[Timing]:
    """Check, then time, every implementation that runs here, or the reference if there is no other."""
    platform = Platform.of(bench.device)
    for subject in subjects:
        if only and only not in subject.op.name:
            continue
        runnable = [i for i in subject.op.implementations if i.supports(platform)]
        try:
            yield from _time(subject, runnable, dtype, bench)
        except torch.OutOfMemoryError:
            yield Timing(subject, "all", 0.0, "does not fit into this device's memory")


@torch.inference_mode()
def _time(subject: Subject, runnable: list[Implementation], dtype: torch.dtype, bench: Bench) -> Iterator[Timing]:
    arguments, options = subject.case.lasting(dtype, bench.device), subject.case.options(dtype, bench.device)
    run = partial(result_of, subject.case, arguments, options)
    wanted = run(subject.op.reference)
    loaded = [(i.name, i.load) for i in runnable] or [("reference", lambda: subject.op.reference)]
    for name, load in loaded:
        call = Recorded(subject.op.name, load(), arguments, options)
        try:
            error = difference(run(call.function), wanted, subject.case)
        except (RuntimeError, NotImplementedError) as problem:
            error = f"{type(problem).__name__}: {str(problem).splitlines()[0]}"
        yield Timing(subject, name, 0.0 if error else _seconds(call, bench), error)


def result_of(case: OpCase, arguments: tuple, options: dict[str, Any], function: Callable[..., Any]) -> Any:
    """Return the result of one call. Where that is stored in the first argument, this is zeros before the call, and a
    copy is returned."""
    if not case.stores:
        return function(*arguments, **options)
    arguments[0].zero_()
    function(*arguments, **options)
    return arguments[0].clone()


def _seconds(call: Recorded, bench: Bench) -> float:
    """Return the seconds of one call, over enough copies of the arguments that they push each other out of the
    cache."""
    rounds: list[Callable[[], object]] = [call.again(fresh=n > 0) for n in range(bench.copies(max(1, call.bytes)))]
    return bench.seconds(*rounds)


def difference(got: Any, wanted: Any, case: OpCase) -> str:
    """Return "" if all of `got` is within tolerance of `wanted`, else one phrase that says how far off it is.

    The tolerance is the case's epsilons of the dtype, relative and absolute, and its slack for float32 sums.
    Integers must be equal.
    """
    for ours, theirs in zip(_tensors(got), _tensors(wanted), strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"is {list(ours.shape)} {ours.dtype}, not {list(theirs.shape)} {theirs.dtype}"
        if not ours.dtype.is_floating_point:
            if not torch.equal(ours, theirs):
                return f"{int((ours != theirs).sum())} of {ours.numel()} values differ"
            continue
        error = (ours.float() - theirs.float()).abs()
        if not bool((error <= allowed(theirs, case)).all()):  # NaN is not within any tolerance
            return f"off by up to {float(error.max()):.3g}"
    return ""


def allowed(wanted: Tensor, case: OpCase) -> Tensor:
    """Return the largest error of each number that is right."""
    tolerance = case.epsilons * torch.finfo(wanted.dtype).eps
    return tolerance * wanted.float().abs() + tolerance + case.slack * 2.0**-24


def _tensors(result: Any) -> tuple[Tensor, ...]:
    if dataclasses.is_dataclass(result):
        return tuple(vars(result).values())
    if isinstance(result, tuple):
        return tuple(tensor for part in result for tensor in _tensors(part))
    return (result,)


def dtype_called(name: str) -> torch.dtype:
    """Return the dtype. Raise InvalidConfig for anything but float32, bfloat16 and float16."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise InvalidConfig(f"unknown dtype {name!r}; use {', '.join(known)}.")
    return known[name]
