"""The process that checks and times the jobs of a sweep: `python -m ridgeline_bench.sweep.child FILE`.

The file says which sweep, with which options, and the numbers of the jobs to do. A line is printed for each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from ridgeline.kernels.base.launch import settle_cache_keys
from ridgeline_bench.sweep.options import SweepOptions, loaded
from ridgeline_bench.sweep.sweep import Job, Sweep, chosen_jobs


def main(path: Path) -> None:
    asked = json.loads(path.read_text())
    given: dict[str, Any] = asked["options"]
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    settle_cache_keys()
    torch.manual_seed(0)
    do(loaded(asked["kind"])(SweepOptions(**given), "cuda"), asked["jobs"])


def do(sweep: Sweep, numbers: list[int]) -> None:
    """Do the jobs with these numbers, and print a line for each. Cuts that were wrong are not done again."""
    jobs, wrong = chosen_jobs(sweep), list[Job]()
    for number in numbers:
        job, broken = jobs[number], False
        try:
            answer = {"left": True} if any(job.is_again(one) for one in wrong) else sweep.answer(job)
        except AssertionError as error:
            answer = {"failed": str(error)}
            wrong.append(job)
        except Exception as error:
            answer, broken = {"failed": f"{type(error).__name__}: {error}"[:600], "broken": True}, True
        print("\n" + json.dumps({"number": number, **answer}), flush=True)
        if broken:
            sys.exit(1)  # after an error on the device nothing works


if __name__ == "__main__":
    main(Path(sys.argv[1]))
