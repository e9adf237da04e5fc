"""The rungs of a kernel ladder: checked, then timed beside libraries on a GPU; predicted without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.machine.probes import Bench
from ridgeline_bench.results import Record

LADDERS = ("gemm", "attention")
OPERANDS = 4  # in turn, so that the cache holds none of them


@dataclass(frozen=True)
class RungTime:
    """A rung on one problem: seconds measured (0: not), the least seconds, what sets those, and a fault ("": none).

    flops: FLOPs that the result needs.
    peer: it is a library, beside which rungs are shown.
    """

    ladder: str
    rung: str
    problem: str
    flops: float
    least: float = 0.0
    limiter: str = ""
    seconds: float = 0.0
    error: str = ""
    peer: bool = False

    def record(self, base: Record) -> Record:
        """Return the time as a result in µs."""
        return Record(
            engine=base.engine, version=base.version, dtype=base.dtype, machine=base.machine, date=base.date,
            workload=f"ladder:{self.ladder}", metric=f"{self.problem} [{self.rung}]", value=1e6 * self.seconds,
            unit="µs", limit=1e6 * self.least, samples=(1e6 * self.seconds,), options={"flops": self.flops},
        )  # fmt: skip


Call = Callable[[], object]


class Operands(Protocol):
    """A problem's operands on the GPU, `OPERANDS` sets of them, and their exact result."""

    @property
    def peers(self) -> Mapping[str, Sequence[Call]]:
        """Libraries that are installed here, each as one call for each set."""

    def rung(self, name: str) -> Sequence[Call] | None:
        """Return a rung as one call for each set, or None if it is for another GPU."""

    def fault(self, call: Call, rung: str = "") -> str:
        """Run the call of the first set and return what is wrong with its result, in words, or "". rung: whose it is,
        "" for a library's."""


class Problem(Protocol):
    """One shape of a ladder's work."""

    @property
    def name(self) -> str:
        """The shape, as tables show it."""

    @property
    def flops(self) -> float:
        """FLOPs that the result needs."""

    def least(self) -> Iterator[tuple[str, float, str]]:
        """Yield each rung's name, its least seconds and what sets those."""

    def operands(self, cubins: Path | None) -> Operands:
        """Return operands on the current GPU. cubins: a folder with machine code of rungs in CUDA C++."""


def ladder(name: str, device: torch.device, bench: Bench, cubins: Path | None = None) -> Iterator[RungTime]:
    """Yield the libraries and every rung of a ladder, for every problem.

    cubins: a folder with the rungs' machine code, for a machine without a CUDA compiler.

    Raises InvalidConfig for an unknown ladder, or where the package is installed without its ladders.
    """
    if name not in LADDERS:
        raise InvalidConfig(f"there is no ladder {name!r}; choose one of: {', '.join(LADDERS)}.")
    if find_spec(f"ridgeline.kernels.{name}.ladder") is None:
        raise InvalidConfig(
            "the ladders are not in the wheel; clone the repository and install it with pip install -e ."
        )
    problems: Sequence[Problem] = import_module(f"ridgeline_bench.ladders.{name}").PROBLEMS
    if device.type == "cuda":
        return (each for problem in problems for each in _measured(name, problem, bench, cubins))
    return (
        RungTime(name, rung, problem.name, problem.flops, least, limiter)
        for problem in problems
        for rung, least, limiter in problem.least()
    )


def _measured(name: str, problem: Problem, bench: Bench, cubins: Path | None) -> Iterator[RungTime]:
    operands = problem.operands(cubins)
    for peer, calls in operands.peers.items():
        error = operands.fault(calls[0])
        seconds = 0.0 if error else bench.seconds(*calls)
        yield RungTime(name, peer, problem.name, problem.flops, seconds=seconds, error=error, peer=True)
    for rung, least, limiter in problem.least():
        found = operands.rung(rung)
        if found is None:
            continue
        error = operands.fault(found[0], rung)
        seconds = 0.0 if error else bench.seconds(*found)
        yield RungTime(name, rung, problem.name, problem.flops, least, limiter, seconds, error)
