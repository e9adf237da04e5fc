"""The rungs of a kernel ladder: checked, then timed beside libraries on a GPU; predicted without one.

A GPU under load lowers its clock within seconds, so what is timed first looks faster. The libraries, and the rungs that
are nearly as fast, are therefore timed again in turns (`Ladder.rounds`), and these times count.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.machine.probes import Bench
from ridgeline_bench.machine.timing import Effort
from ridgeline_bench.results import Record

EFFORT = Effort(seconds=0.03, repeats=3)


@dataclass(frozen=True)
class Ladder:
    """A ladder's package, and how long its rungs are timed: the effort at first and of a round, and the rounds."""

    package: str
    effort: Effort = EFFORT
    rounds: int = 5


LADDERS = {
    "gemm": Ladder("ridgeline.kernels.gemm.ladder"),
    "attention": Ladder("ridgeline.kernels.attention.ladder"),
    "memory_bound": Ladder("ridgeline.kernels.memory_bound", Effort(seconds=0.012, repeats=3), rounds=3),
}
COPY = "copy"  # a library that moves as many bytes as an op must: what rungs that memory limits are compared with
OPERANDS = 4  # in turn, so that the cache holds none of them
NEAR = 1.3  # times the fastest library's time: the rungs that take turns with the libraries
LONG = 1.0  # predicted seconds of a rung that is left out
SLOW = 0.02  # predicted seconds of a rung that reads one set of operands alone, which the cache does not help


@dataclass(frozen=True)
class RungTime:
    """A rung on one problem: seconds measured (0: not), the least seconds, what sets those, and a fault ("": none).

    flops: FLOPs that the result needs, or 0 where bytes are what counts.
    bytes: those from and to memory that the result needs, where these count.
    peer: it is a library, beside which rungs are shown.
    samples: seconds of each round, of those that took turns.
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
    samples: tuple[float, ...] = ()
    bytes: float = 0.0

    def record(self, base: Record) -> Record:
        """Return the time as a result in µs."""
        return Record(
            engine=base.engine, version=base.version, dtype=base.dtype, machine=base.machine, date=base.date,
            workload=f"ladder:{self.ladder}", metric=f"{self.problem} [{self.rung}]", value=1e6 * self.seconds,
            unit="µs", limit=1e6 * self.least,
            samples=tuple(1e6 * each for each in self.samples or (self.seconds,)),
            options={"bytes": self.bytes} if self.bytes else {"flops": self.flops},
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


def ladder(
    name: str, device: torch.device, bench: Bench, cubins: Path | None = None, only: str = ""
) -> Iterator[RungTime]:
    """Yield the libraries and every rung of a ladder, for every problem.

    cubins: a folder with the rungs' machine code, for a machine without a CUDA compiler.
    only: a part of the names of the rungs that are wanted, or several with commas between them.

    Raises InvalidConfig for an unknown ladder, a part of no rung's name, or where the package is installed without its
    ladders.
    """
    if name not in LADDERS:
        raise InvalidConfig(f"there is no ladder {name!r}; choose one of: {', '.join(LADDERS)}.")
    if find_spec(LADDERS[name].package) is None:
        raise InvalidConfig(
            "the ladders are not in the wheel; clone the repository and install it with pip install -e ."
        )
    problems: Sequence[Problem] = import_module(f"ridgeline_bench.ladders.{name}").PROBLEMS
    names = {rung: None for problem in problems for rung, *_ in problem.least()}
    if not any(_wanted(rung, only) for rung in names):
        raise InvalidConfig(f"no rung's name contains {only!r}; the {name} ladder has {', '.join(names)}.")
    if device.type == "cuda":
        return (each for problem in problems for each in _measured(name, problem, bench, cubins, only))
    return (
        RungTime(name, rung, problem.name, problem.flops, least, limiter, bytes=moves(problem))
        for problem in problems
        for rung, least, limiter in problem.least()
        if _wanted(rung, only)
    )


def _wanted(rung: str, only: str) -> bool:
    return any(part in rung for part in only.split(","))


def moves(problem: Problem) -> float:
    """Return the bytes of a problem whose work is counted in bytes, else 0."""
    return float(getattr(problem, "bytes", 0.0))


def _measured(name: str, problem: Problem, bench: Bench, cubins: Path | None, only: str = "") -> Iterator[RungTime]:
    from ridgeline.kernels.cuda.compile import NoCudaCompiler  # which is not in the wheel

    operands, short, moved = problem.operands(cubins), replace(bench, effort=LADDERS[name].effort), moves(problem)
    found = list[tuple[RungTime, Sequence[Call]]]()
    for peer, calls in operands.peers.items():
        error = operands.fault(calls[0])
        seconds = 0.0 if error else short.seconds(*calls)
        time = RungTime(name, peer, problem.name, problem.flops, seconds=seconds, error=error, peer=True, bytes=moved)
        found.append((time, calls))
    fastest = min((time.seconds for time, _ in found if time.seconds), default=0.0)
    for rung, least, limiter in problem.least():
        try:
            own = operands.rung(rung) if _wanted(rung, only) and least < LONG else None
        except NoCudaCompiler as none:
            raise InvalidConfig(str(none)) from none
        if own is None:
            continue
        error = operands.fault(own[0], rung)
        seconds = 0.0 if error else short.seconds(*own[: 1 if least > SLOW else None])
        time = RungTime(name, rung, problem.name, problem.flops, least, limiter, seconds, error, bytes=moved)
        if error or seconds > NEAR * fastest:
            yield time
        else:
            found.append((time, own))
    rounds = list[dict[int, float]]()
    for turn in range(
        LADDERS[name].rounds
    ):  # each in another order: a kernel behind one that takes little power has a higher clock
        order = random.Random(turn).sample(range(len(found)), len(found))
        rounds.append({n: short.seconds(*found[n][1]) if found[n][0].seconds else 0.0 for n in order})
    for n, (time, _) in enumerate(found):
        samples = tuple(each[n] for each in rounds)
        yield replace(time, seconds=statistics.median(samples), samples=samples)
