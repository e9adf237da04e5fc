"""Comparison of result files, or of two commands in turn, with verdicts that account for noise."""

from __future__ import annotations

import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.noise import FEWEST, Comparison, compare
from ridgeline_bench.results import Record

Key = tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One figure on both sides: the medians and the comparison, which is None if there are too few samples for a
    verdict."""

    what: Key
    a: float
    b: float
    unit: str
    comparison: Comparison | None

    @property
    def verdict(self) -> str:
        return str(self.comparison) if self.comparison else f"too few samples (a verdict needs {FEWEST} a side)"


def diff(a: Iterable[Record], b: Iterable[Record], *, threshold: float) -> list[Row]:
    """Return every figure that both sides have, in A's order. The samples are all runs' values.

    Rates are compared as times (1 / rate), so "slower" always means worse.
    """
    side_a, side_b = _samples(a), _samples(b)
    rows = [_row(key, side_a[key], side_b[key], threshold) for key in side_a if key in side_b]
    if not rows:
        raise InvalidConfig("the two sides share no figure: same workload, model, dtype, GPU and scale are needed.")
    return rows


def of_commit(records: Iterable[Record], commit: str) -> list[Record]:
    """Return the records of one commit, given by a prefix of its hash. Raise InvalidConfig if there are none."""
    records = list(records)
    found = [r for r in records if r.machine.commit.startswith(commit)]
    if not found:
        known = ", ".join(dict.fromkeys(r.machine.commit for r in records if r.machine.commit)) or "none"
        raise InvalidConfig(f"no result of commit {commit!r}; commits in these files: {known}.")
    return found


def _samples(records: Iterable[Record]) -> dict[Key, list[Record]]:
    grouped: dict[Key, list[Record]] = defaultdict(list)
    for record in records:
        if record.better != "neither":
            grouped[(record.engine, *record.what)].append(record)
    return grouped


def _row(key: Key, a: Sequence[Record], b: Sequence[Record], threshold: float) -> Row:
    values_a, values_b = ([s for r in side for s in (r.samples or (r.value,))] for side in (a, b))
    medians = sorted(values_a)[len(values_a) // 2], sorted(values_b)[len(values_b) // 2]
    comparison = None
    if min(len(values_a), len(values_b)) >= FEWEST:
        if a[0].better == "higher":
            values_a, values_b = [1 / v for v in values_a], [1 / v for v in values_b]
        comparison = compare(values_a, values_b, threshold=threshold)
    return Row(key, *medians, a[0].unit, comparison)


def command_seconds(command: str, timeout: float) -> Callable[[], float]:
    """Return a function that runs a shell command and returns its time.

    That is the number on the command's last line of output, if there is one (a benchmark that times itself leaves
    start-up out), else its whole duration.
    """

    def run() -> float:
        started = time.perf_counter()
        try:
            done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired as error:
            raise InvalidConfig(f"command {command!r} took over {timeout:g} s; raise --timeout.") from error
        seconds = time.perf_counter() - started
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise InvalidConfig(f"command {command!r} failed with exit code {done.returncode}: {reason}")
        last = (done.stdout.strip().splitlines() or [""])[-1]
        try:
            return float(last)
        except ValueError:
            return seconds

    return run
