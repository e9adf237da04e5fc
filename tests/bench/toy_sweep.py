"""A sweep whose cuts are right, wrong, slow, or deadly. It needs no GPU."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from ridgeline_bench.sweep.sweep import Job, Limit, Sweep

RIGHT, WRONG, DEADLY, SLOW, RAISES = range(5)


@dataclass(frozen=True)
class Cut:
    number: int
    stages: int


class Toy(Sweep):
    start, silence = 60.0, 4.0

    def jobs(self) -> list[Job]:
        first = [(Cut(n, 1), tokens) for tokens, n in enumerate((RIGHT, WRONG, WRONG, RIGHT, DEADLY, SLOW, RAISES))]
        last = [Job("last", "op", tokens=9, cut=cut) for cut in (Cut(DEADLY, 2), Cut(RIGHT, 1), Cut(WRONG, 1))]
        jobs = [Job("first", "op", tokens, cut=cut) for cut, tokens in first]
        return [*jobs[:5], *last, *jobs[5:]]

    def answer(self, job: Job) -> dict[str, Any]:
        if job.case == "first":
            assert job.cut.number != WRONG or job.tokens > 1, "error 2.0"
            if job.cut.number == WRONG:  # launched again, although it was wrong
                os._exit(9)
            if job.cut.number == DEADLY:
                os._exit(9)
            if job.cut.number == SLOW:
                time.sleep(600)
            if job.cut.number == RAISES:
                raise ValueError("of shapes")
        return {"error": 0.0, "us": 1.0, "limit_us": 0.5, "flops": 1.0, "note": ""}

    def arguments(self, job: Job) -> list[Any]:
        raise NotImplementedError

    def launch(self, job: Job, arguments: Any) -> Any:
        raise NotImplementedError

    def reference(self, job: Job, arguments: Any) -> Any:
        raise NotImplementedError

    def limit(self, job: Job, calls: list[Any]) -> Limit:
        raise NotImplementedError
