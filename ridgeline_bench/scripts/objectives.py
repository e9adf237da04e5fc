"""Requests whose first token comes in time: policy slo beside first come, first served, on this machine's CPU.

    python -m ridgeline_bench.scripts.objectives [--model FOLDER] [--ttft 500] [--seconds 8] [--repeats 4]
        [--slots 32] [--seed 1] [--output benchmarks/results/objectives.jsonl] [--quick]

Requests come at random moments (Poisson) at a rate. Goodput is the number of them a second whose first token comes
within --ttft milliseconds; what the policy refuses is not in time. First the rate is looked for at which first come,
first served collapses: fewer than 0.8 of the requests are in time. Then both policies get the same requests, in turn
and as often as --repeats says, at 1.2 and 0.7 of that rate. A ratio is that of two runs with the same requests, one
after the other.

Engine and policy run as they are served, with the model on the CPU. Their clock counts this process's processor time,
and jumps to the next request while there is nothing to do. So other work on the machine does not become part of the
figures.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from ridgeline.core.errors import CannotPromise
from ridgeline.core.plan.request import Request, SamplingParams
from ridgeline.engine.engine import Engine
from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline_bench.scripts.asked import asked, keep
from ridgeline_bench.scripts.driven import Driven, Wanted

POLICIES = ("fcfs", "slo")
SHARE = 0.8  # of the requests in time, below which a policy has collapsed
LOADS = (1.2, 0.7)  # times the rate of the collapse
GROWTH = 1.15  # of the rate, from one run of the search to the next
OUTPUT = 24  # tokens of an answer
PROMPTS = 64, 320  # tokens of a prompt, from and to


class GoodputRun(NamedTuple):
    """came: requests that came. good: those in time. refused: those that the policy did not take."""

    came: int
    good: int
    refused: int
    seconds: float

    @property
    def goodput(self) -> float:
        return self.good / self.seconds

    @property
    def share(self) -> float:
        return self.good / self.came


class PromisingEngine(Driven):
    """An engine whose requests may be refused. ttft: seconds to the first token that are promised."""

    def __init__(self, model: str, policy: str, slots: int, ttft: float) -> None:
        sizes = {"max_num_seqs": slots, "max_model_len": 512, "device": "cpu"}
        super().__init__(model, **sizes, scheduling_policy=policy, slo_ttft_ms=1e3 * ttft)
        self.ttft, self._jumped = ttft, 0.0
        made = self.llm.engine
        self.engine = Engine(
            made.config,
            made.layout,
            made._worker,
            vocab_size=self._vocabulary,
            cost_model=made._cost_model,
            clock=self.now,
        )

    def now(self) -> float:
        """Return the seconds of the engine's clock."""
        return time.process_time() + self._jumped

    def serve(self, work: list[Wanted], seconds: float) -> GoodputRun:
        """Run requests that come within so many seconds, and say how many were in time. Those that cannot be any more
        are given up at the end."""
        waiting, due, good, refused = deque(work), dict[str, float](), 0, 0
        names = list[str]()
        began = self.now()
        while (now := self.now() - began) < seconds + self.ttft:
            while waiting and waiting[0].at <= now:
                wanted = waiting.popleft()
                try:
                    names.append(self.ask(wanted, began + wanted.at))
                    due[names[-1]] = wanted.at + self.ttft
                except CannotPromise:
                    refused += 1
            if not self.engine.has_work:
                if not waiting:
                    break
                self._jumped += max(0.0, waiting[0].at - now)
                continue
            events = self.engine.step()
            moment = self.now() - began
            for event in events:
                good += moment <= due.pop(event.request_id, -math.inf)
        for name in names:
            self.engine.abort(name)
        while self.engine.has_work:
            self.engine.step()
        return GoodputRun(len(work), good, refused, seconds)

    def ask(self, wanted: Wanted, arrival: float) -> str:
        """Give the engine a request that came at a moment of its clock."""
        self._made += 1
        name, prompt = str(self._made), tuple(wanted.prompt)
        params = SamplingParams(temperature=0.0, max_tokens=wanted.tokens, ignore_eos=True, detokenize=False)
        total = len(prompt) + wanted.tokens
        self.engine.add(
            Request(id=name, prompt_token_ids=prompt, params=params, seed=0, max_total_tokens=total, arrival=arrival)
        )
        return name


def arrivals(engine: PromisingEngine, rate: float, seconds: float, seed: int) -> list[Wanted]:
    """Return requests that come within so many seconds."""
    draw, at, found = random.Random(f"{seed}/{rate}"), 0.0, list[Wanted]()
    while (at := at + draw.expovariate(rate)) < seconds:
        (prompt,) = engine.prompts(1, draw.randint(*PROMPTS))
        found.append(Wanted(prompt, OUTPUT, at))
    return found


def collapse(engine: PromisingEngine, seconds: float, seed: int, first: float) -> float:
    """Return the lowest of some rates at which too few requests are in time."""
    rate = first
    while engine.serve(arrivals(engine, rate, seconds, seed), seconds).share >= SHARE:
        rate *= GROWTH
        print(f"first come, first served keeps {rate / GROWTH:.1f} requests/s", file=sys.stderr, flush=True)
    return rate


def compared(engines: list[PromisingEngine], rate: float, seconds: float, seed: int) -> dict[str, GoodputRun]:
    """Return the outcome of the same requests with each policy, one after the other."""
    work = arrivals(engines[0], rate, seconds, seed)
    return {policy: engine.serve(work, seconds) for policy, engine in zip(POLICIES, engines, strict=True)}


def lines(a: Any) -> Iterator[dict[str, Any]]:
    """Yield a line for each load."""
    ttft, seconds = a.ttft / 1e3, 1.5 if a.quick else a.seconds
    engines = [PromisingEngine(a.model, policy, a.slots, ttft) for policy in POLICIES]
    try:
        for engine in engines:  # kernels and rates are learned before anything counts
            engine.serve(arrivals(engine, 4.0, 2.0, a.seed), 2.0)
        rate = collapse(engines[0], seconds, a.seed, 40.0 if a.quick else 4.0)
        for load in LOADS:
            runs = [compared(engines, load * rate, seconds, a.seed + n) for n in range(1 if a.quick else a.repeats)]
            ratios = [run["slo"].good / max(1, run["fcfs"].good) for run in runs]
            yield {
                "what": "objectives",
                "load": load,
                "rate": load * rate,
                "ttft_ms": a.ttft,
                "seconds": seconds,
                "slots": a.slots,
                "goodput": {name: [run[name].goodput for run in runs] for name in POLICIES},
                "refused": [run["slo"].refused / run["slo"].came for run in runs],
                "ratios": ratios,
                "median_ratio": statistics.median(ratios),
            }
    finally:
        for engine in engines:
            engine.close()


def main() -> None:
    a = asked(
        __doc__,
        model=str(EMBEDDED_MODEL),
        ttft=500.0,
        seconds=8.0,
        repeats=4,
        slots=32,
        seed=1,
        output=Path,
        quick=False,
    )
    shown = Table(*("load", "requests/s", "fcfs in time/s", "slo in time/s", "slo refused", "ratio, median and range"))
    for line in lines(a):
        keep(a.output, line)
        means = [f"{statistics.mean(line['goodput'][name]):.2f}" for name in POLICIES]
        ratios = line["ratios"]
        shown.add_row(
            f"{line['load']:g}",
            f"{line['rate']:.1f}",
            *means,
            f"{100 * statistics.mean(line['refused']):.0f} %",
            f"{line['median_ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        )
    Console().print(shown)


if __name__ == "__main__":
    main()
