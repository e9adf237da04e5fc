"""Measure on a GPU how far the cuts that kernels use are from tuned ones, for shapes that no tuner has seen:

    python -m ridgeline_bench.scripts.held_out_cuts [--shapes 32] [--seed 1] [--json FILE]

The shapes are drawn by the seed, in turns for each op with cuts that are tuned. None of them was measured by the tuner.
About half have the widths of a class, with other numbers of tokens, and get its cut; the others have widths without a
class, and get the rule's. Each is tuned as `ridgeline kernels tune` would: what runs by itself, with the file and the
rules, stands beside the fastest of the cuts that the model ranks first and some that are drawn. The goal is 5 % at most
behind the fastest, and 10 % for the worst shape.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from random import Random
from typing import Any

import torch

from ridgeline.kernels.base import tuned
from ridgeline.kernels.ops import OPS
from ridgeline.perf.search import SearchSettings
from ridgeline_bench.sweep.pairs import Pair
from ridgeline_bench.sweep.tune import Tuned, TuneOptions, gpu_here, line, tune
from ridgeline_bench.sweep.tuning import machine_facts, shown

GOAL, WORST = 1.05, 1.10


def drawn(number: int, seed: int, only: tuple[str, ...] = ()) -> list[Pair]:
    """Return pairs of shapes that are none of those that a tuner measures."""
    random, found = Random(seed), list[Pair]()
    ops = {name: cuts.tuning for name, op in OPS.items() if (cuts := op.cuts()) is not None and cuts.tuning is not None}
    names = [name for name in ops if not only or name in only]
    while len(found) < number:
        name = names[len(found) % len(names)]
        tuning = ops[name]
        case = tuning.drawn(random)
        if case not in tuning.classes and Pair(name, case) not in found and len(Pair(name, case).jobs()) > 1:
            found.append(Pair(name, case))
    return found


def behind(answer: Tuned) -> float:
    """Return how many times the fastest one's time what runs by itself takes; infinity if one of them did not run."""
    return answer.before_us / answer.best["us"] if answer.best and answer.before_us else float("inf")


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Cuts of shapes that no tuner has seen, beside tuned ones.")
    parser.add_argument("--shapes", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ops", nargs="*", default=())
    parser.add_argument("--drawn", type=int, default=2, help="cuts of a shape that are tried whatever the model says")
    parser.add_argument("--seconds", type=float, default=0.0, help="of all; 0: no limit")
    parser.add_argument("--json", type=Path, help="result lines are appended to this file")
    parser.add_argument("--commit", default="")
    flags = parser.parse_args(given)
    if not torch.cuda.is_available():
        print("there is no GPU here to time cuts on.", file=sys.stderr)
        return 2
    settings = SearchSettings(drawn=flags.drawn, seconds=15.0, repeats=10, seed=flags.seed)
    options = TuneOptions(
        settings=settings, seconds=flags.seconds, processes=min(32, os.cpu_count() or 1), shipped=True
    )
    pairs, answers = drawn(flags.shapes, flags.seed, tuple(flags.ops)), list[Tuned]()
    base: dict[str, Any] = machine_facts(flags.commit) | {"command": " ".join(("held_out_cuts", *given))}
    for answer in tune(pairs, options):
        answers.append(answer)
        print(f"{len(answers)}/{len(pairs)} {behind(answer):.3f} {shown(answer)}", flush=True)
        if flags.json:
            with flags.json.open("a") as file:
                facts = {"workload": f"held out:{answer.pair.op}", "seed": flags.seed, "class": has_class(answer.pair)}
                record = line(answer, base) | facts
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
    for known in (True, False):
        times = sorted(behind(answer) for answer in answers if has_class(answer.pair) == known)
        print(f"{'with' if known else 'without'} a class: {summary(times)}")
    times = sorted(behind(answer) for answer in answers)
    print(f"all: {summary(times)}; {len(pairs) - len(answers)} of {len(pairs)} shapes not measured")
    return 0 if len(times) == len(pairs) and times[-1] <= WORST and _near(times) == len(pairs) else 1


def has_class(pair: Pair) -> bool:
    """Return True if the file of tuned cuts has a line for the shape's class."""
    return tuned.knows(pair.op, pair.tuning.shape(pair.case), gpu_here())


def summary(times: list[float]) -> str:
    """Return how many of some times, as shares of the fastest one's, are near, and the worst of them."""
    worst = f", the worst {100 * (times[-1] - 1):.1f} % behind" if times else ""
    return f"{_near(times)} of {len(times)} shapes within 5 % of tuned{worst}"


def _near(times: list[float]) -> int:
    return sum(each <= GOAL for each in times)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
