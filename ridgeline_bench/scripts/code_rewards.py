"""Programs a second that rewards of code run in isolation: by workers that are kept, and by one that starts for each.

    python -m ridgeline_bench.scripts.code_rewards [--programs 1000] [--tests 8] [--workers 0] [--rounds 3]
        [--commit HASH] [--output FILE.jsonl]

A program imports two modules, defines a function, and answers --tests calls of it. --workers 0: as many as cores. Both
ways take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

from ridgeline.core.cores import available
from ridgeline.core.errors import InvalidConfig
from ridgeline.training.sandbox import CodeCall, SealedWorkers, refusal
from ridgeline_bench.results import host_with
from ridgeline_bench.scripts.asked import asked, check_counts, keep, told

SOURCE = "import collections, re\n\ndef f(words):\n    return collections.Counter(re.findall('[a-z]+', words))['b']\n"


def rate(programs: int, threads: int, run: Callable[[], int], tests: int) -> float:
    """Return the programs a second of some threads. Raise InvalidConfig if one fails."""
    with ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        right = set(pool.map(lambda _: run(), range(programs)))
        seconds = time.perf_counter() - started
    if right != {tests}:
        raise InvalidConfig(f"programs should pass {tests} tests each, and passed {sorted(right)}.")
    return programs / seconds


def main() -> None:
    given = asked(
        __doc__, programs=1000, tests=8, workers=(0, "0: as many as cores"), rounds=3, commit="", output=Path
    )  # fmt: skip
    check_counts(given, "programs", "tests", "rounds")
    if (why := refusal()) is not None:
        raise InvalidConfig(f"code cannot be isolated here: {why}.")
    count = given.workers or available()
    calls = [CodeCall(["a b " * number], number) for number in range(given.tests)]
    found: dict[str, list[float]] = {"kept": [], "one each": []}
    with SealedWorkers(count) as kept:

        def alone() -> int:
            with SealedWorkers(1) as worker:
                return worker.passed(SOURCE, "f", calls)

        for _ in range(given.rounds):
            found["kept"].append(rate(given.programs, count, lambda: kept.passed(SOURCE, "f", calls), given.tests))
            found["one each"].append(rate(max(1, given.programs // 10), count, alone, given.tests))
    machine = asdict(host_with(torch.device("cpu"), given.commit))
    for name, rates in found.items():
        print(f"{count} workers, {name}: {median(rates):,.0f} programs/s")
        what = {"workload": "code rewards", "workers": name, "count": count, "tests": given.tests}
        keep(given.output, {"machine": machine, **what, "programs_per_s": rates, "median": median(rates)})


if __name__ == "__main__":
    with told():
        main()
