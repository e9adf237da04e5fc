"""`ridgeline kernels tune`: runs the tuner, shows what each pair gave, and keeps cuts and records."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from rich.console import Console

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base import tuned
from ridgeline.kernels.ops import OPS
from ridgeline_bench.results import host_with
from ridgeline_bench.sweep.pairs import dealt, tuned_pairs
from ridgeline_bench.sweep.tune import Tuned, TuneOptions, compile_cuts, gpu_here, line, settings_of, tune


class Kept(NamedTuple):
    """What is kept of a run. cuts: the file of tuned cuts; None: the user's own. records: of a line for each pair."""

    cuts: Path | None = None
    records: Path | None = None
    commit: str = ""


def run(only: tuple[str, ...], case: str, options: TuneOptions, kept: Kept, compile_only: bool = False) -> bool:
    """Tune ops, all that can be if none is named, and return False if a pair failed or was not reached.

    Raises InvalidConfig if there is no GPU, no such op, or no such case.
    """
    known = [name for name, op in OPS.items() if (cuts := op.cuts()) is not None and cuts.tuning is not None]
    if wrong := [name for name in only if name not in known]:
        raise InvalidConfig(f"op {wrong[0]!r} has no cuts that are tuned; known: {', '.join(known)}.")
    pairs = list(dealt(tuned_pairs(only, case)))
    if options.pairs:
        pairs = Random(options.settings.seed).sample(pairs, min(options.pairs, len(pairs)))
    if not pairs:
        raise InvalidConfig(f"no class of shapes has {case!r} in its label.")
    console, started = Console(), time.monotonic()
    if compile_only:
        done = compile_cuts(pairs, options)
        for failure in done.failures:
            console.print(failure, markup=False, soft_wrap=True)
        console.print(f"{done.kernels} kernels of {len(pairs)} pairs compiled in {done.seconds:.0f} s")
        return not done.failures
    if not torch.cuda.is_available():
        raise InvalidConfig("there is no GPU here to tune for; --compile-only needs none.")
    path = kept.cuts or tuned.path_of(gpu_here())
    tuned.check(path)
    open_records(kept.records)
    base = machine_facts(kept.commit) | {"command": "ridgeline kernels tune", "settings": settings_of(options)}
    answers = list[Tuned]()
    for answer in tune(pairs, options, lambda text: console.print(text, markup=False, soft_wrap=True)):
        answers.append(answer)
        if answer.best:
            tuned.write(path, [answer.kept()])  # at once: a run that is ended keeps what it found
        console.print(f"{len(answers)}/{len(pairs)} {shown(answer)}", markup=False, soft_wrap=True)
        if kept.records:
            with kept.records.open("a") as file:
                file.write(json.dumps(line(answer, base), ensure_ascii=False) + "\n")
    console.print(summary(answers, len(pairs), time.monotonic() - started, path), markup=False, soft_wrap=True)
    return len(answers) == len(pairs) and all(answer.best for answer in answers)


def open_records(path: Path | None) -> None:
    """Raise OSError if lines cannot be added to a file: better now than after the work."""
    if path is not None:
        path.open("a").close()


def machine_facts(commit: str) -> dict[str, Any]:
    """Return what every result line says of the machine and the day."""
    machine = asdict(host_with(torch.device("cuda" if torch.cuda.is_available() else "cpu"), commit))
    return {"machine": machine, "date": datetime.now(UTC).date().isoformat()}


def shown(answer: Tuned) -> str:
    """Return a pair's answer in one line."""
    if answer.best is None:
        return f"FAILED {answer.pair}: {answer.failed or 'no cut was right and in time'}"
    us, before = answer.best["us"], answer.before_us
    gain = f"{before / us:.2f} times as fast as before" if before else "nothing ran before"
    how = "the rule's" if answer.cut is None else " ".join(str(value) for value in answer.cut.values())
    return (
        f"{answer.pair}: {us:.2f} µs, limit {answer.limit_us:.2f}, {gain}, {how}; {len(answer.trials)} cuts in "
        f"{answer.took:.1f} s"
    )


def summary(answers: list[Tuned], pairs: int, took: float, path: Path) -> str:
    """Return what a run did, in a few lines."""
    gains = sorted(answer.before_us / answer.best["us"] for answer in answers if answer.best and answer.before_us)
    times = [answer.took for answer in answers]
    middle = (
        f"; the median pair is {gains[len(gains) // 2]:.3f} times as fast, the most {gains[-1]:.3f}" if gains else ""
    )
    return (
        f"{len(answers)} of {pairs} pairs tuned in {took:.0f} s, {sum(times) / max(1, len(times)):.2f} s each without "
        f"compiling, {max(times, default=0):.1f} at most{middle}; written to {path}"
    )
