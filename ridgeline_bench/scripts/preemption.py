"""The cost of preemption where requests need more of the KV cache than there is: the scheduler and the prefix cache.

    python -m ridgeline_bench.scripts.preemption [--json benchmarks/results/preemption.jsonl] [--only equal ...]
    python -m ridgeline_bench.scripts.preemption --draw        # docs/images/preemption.svg, from the stored results
        (extra `train`)

Scheduler, cache and plans are the engine's own. Only the model is left out: a worker gives random tokens, and ends each
request where a draw made beforehand says. *Oversubscription* is the need of all requests that run or wait, each with
its whole output, divided by the pool. At 1.2 they need 1.2 times the pages that there are.

    at once   all requests come before the first step, to an engine that has seen none before
    steady    whenever requests end, new ones come until the need is again what it was

Steps are of 512 tokens at most, so a step with prompts takes about as long as one without on a GPU that reads weights
most of the time, and tokens that run again cost steps.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ridgeline.core.plan.request import Request, SamplingParams
from ridgeline.core.plan.step import Assign, Finish, Release, StepPlan, StepResult
from ridgeline.core.settings.config import EngineConfig
from ridgeline.core.specs.cache_layout import CacheGroup, CacheLayout
from ridgeline.core.specs.state import KVSpec, RecurrentSpec, StatePart, StateSpec
from ridgeline.engine.scheduler import Scheduler
from ridgeline.engine.sequence import Sequence
from ridgeline_bench.scripts.asked import OneOf, asked, keep

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "preemption.jsonl"
IMAGE = ROOT / "docs" / "images" / "preemption.svg"
FACTORS = (1.0, 1.1, 1.2, 1.5, 2.0)
BLOCK, BUDGET, SLOTS = 16, 512, 128
HOLDS = 32  # requests of mean length that the pool holds
ROUNDS = 6  # times the pool's tokens that steady requests need altogether
CONTEXT = 4096

FULL = KVSpec(num_kv_heads=2, head_dim=64)
WINDOWED = KVSpec(num_kv_heads=2, head_dim=64, window=128)
STATE = RecurrentSpec(parts=(StatePart((64, 64)),))

Lengths = tuple[int, int, int]  # of a prompt, of its output, and the most that its client allows


@dataclass(frozen=True)
class Workload:
    """Requests of one kind. groups: the model's layers of each kind. lengths: drawn for each request. shared: tokens
    of the prompt that an eighth of the requests have in common. ranks: so many priorities."""

    name: str
    lengths: Callable[[random.Random], Lengths]
    groups: tuple[tuple[StateSpec, int], ...] = ((FULL, 4),)
    shared: int = 0
    ranks: int = 1


def equal(draw: random.Random) -> Lengths:
    return 256, 256, 256


def mixed(draw: random.Random) -> Lengths:
    """Lengths as of chats, whose clients name a limit that few reach."""
    prompt = min(1024, max(16, round(draw.lognormvariate(5.3, 0.8))))
    output = min(1024, max(16, round(draw.lognormvariate(5.3, 0.8))))
    return prompt, output, 1024


WORKLOADS = (
    Workload("equal", equal),
    Workload("mixed", mixed),
    Workload("shared", mixed, shared=192),
    Workload("priorities", mixed, ranks=3),
    Workload("windows", mixed, groups=((FULL, 1), (WINDOWED, 3))),
    Workload("hybrid", mixed, groups=((FULL, 1), (STATE, 3))),
)


def layout_of(workload: Workload, num_pages: int) -> CacheLayout:
    layers = itertools.count()
    groups = [(spec, tuple(itertools.islice(layers, count))) for spec, count in workload.groups]
    return CacheLayout(
        groups=tuple(CacheGroup(spec=spec, layers=own) for spec, own in groups),
        block_size=BLOCK,
        dtype="bfloat16",
        num_pages=num_pages,
    )


class RandomWorker:
    """Gives each row a token, and ends a request after as many tokens as `lengths` has for its seed."""

    def __init__(self, lengths: dict[int, int]) -> None:
        self._lengths, self._draw = lengths, np.random.default_rng(0)
        self._slots: dict[int, list[int]] = {}  # tokens in the cache, those at which it ends, its limit
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepResult:
        plan = self._plans.popleft()
        for delta in plan.deltas:
            if isinstance(delta, Assign):
                self._slots[delta.slot] = [delta.kv_len, self._lengths[delta.seed], delta.max_total_tokens]
            elif isinstance(delta, Release):
                del self._slots[delta.slot]
        rows = plan.rows
        tokens_R = self._draw.integers(1 << 14, size=len(rows))
        finish_R = np.zeros(len(rows), np.int8)
        counts = zip(rows.slots_R.tolist(), rows.num_tokens_R.tolist(), rows.num_logits_R.tolist(), strict=True)
        for row, (slot, count, logits) in enumerate(counts):
            state = self._slots[slot]
            if not logits or state[0] >= state[1] - 1:
                tokens_R[row] = -1
            state[0] += count
            if logits and tokens_R[row] >= 0 and state[0] + 1 == state[1]:
                finish_R[row] = Finish.LENGTH if state[1] == state[2] else Finish.STOP
        emitted_R = (tokens_R >= 0).astype(np.int32)
        return StepResult(plan_id=plan.id, tokens_RK=tokens_R[:, None], emitted_R=emitted_R, finish_R=finish_R)


@dataclass
class Run:
    """One workload at one oversubscription. known, found: tokens of preempted requests when they went on, and those of
    them that the cache still had. ran: tokens of all steps. latencies: of requests, in steps."""

    workload: Workload
    factor: float
    steady: bool
    steps: int = 0
    ran: int = 0
    known: int = 0
    found: int = 0
    wasted: int = 0
    done: int = 0
    emitted: int = 0
    latencies: list[int] = field(default_factory=list)
    preemptions: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._draw = random.Random(1)
        draws = random.Random(2)
        drawn = [self.workload.lengths(draws) for _ in range(1000)]
        probe = layout_of(self.workload, 2)
        held = [self._pages(probe, sum(lengths[:2]) + self.workload.shared) for lengths in drawn]
        num_pages = 1 + round(HOLDS * sum(held) / len(held))
        self._layout = layout_of(self.workload, num_pages)
        policy = "priority" if self.workload.ranks > 1 else "fcfs"
        sizes = {"max_model_len": CONTEXT, "max_num_seqs": SLOTS, "max_num_batched_tokens": BUDGET}
        self._scheduler = Scheduler(EngineConfig(**sizes, scheduling_policy=policy), self._layout)
        self._scheduler.on_finish = lambda request, stats: self._end(request)
        self._ends: dict[int, int] = {}
        self._worker = RandomWorker(self._ends)
        self._need: dict[int, float] = {}
        self._came: dict[int, int] = {}
        self._total = 0.0
        self._watch()

    @staticmethod
    def _pages(layout: CacheLayout, tokens: int) -> float:
        groups = enumerate(layout.groups)
        return sum(group.spec.blocks_needed(tokens, 1, BLOCK) / layout.blocks_per_page(g) for g, group in groups)

    def _watch(self) -> None:
        """Note what the cache has of a request that goes on."""
        start = self._scheduler.running.start

        def noted(seq: Sequence, *args: Any, **settings: Any) -> bool:
            started = start(seq, *args, **settings)
            if started and seq.preemptions:
                self.known += seq.may_skip
                self.found += seq.cached_tokens
            return started

        self._scheduler.running.start = noted  # type: ignore[method-assign]

    def _request(self) -> Request:
        number, draw = len(self._came), self._draw
        prompt, output, limit = self.workload.lengths(draw)
        own = [draw.randrange(1 << 14) for _ in range(prompt)]
        common = random.Random(number % 8)
        tokens = tuple(common.randrange(1 << 14) for _ in range(self.workload.shared)) + tuple(own)
        self._came[number], self._ends[number] = self.steps, len(tokens) + output
        self._need[number] = self._pages(self._layout, len(tokens) + output)
        self._total += self._need[number]
        params = SamplingParams(temperature=1, max_tokens=limit, ignore_eos=output == limit)
        priority = draw.randrange(self.workload.ranks)
        return Request(
            id=str(number),
            prompt_token_ids=tokens,
            params=params,
            seed=number,
            max_total_tokens=len(tokens) + limit,
            priority=priority,
        )

    def _end(self, request: Request) -> None:
        del self._need[request.seed]
        self.latencies.append(self.steps - self._came[request.seed])
        self.done += 1
        self.emitted += self._ends[request.seed] - len(request.prompt_token_ids)

    def _top_up(self) -> None:
        pages = self._layout.num_pages - 1
        most = (ROUNDS if self.steady else 1) * self.factor * pages
        while sum(self._need.values()) < self.factor * pages and self._total < most:
            self._scheduler.add(self._request())

    def run(self) -> Run:
        self._top_up()
        while self._scheduler.has_work:
            while len(self._scheduler.in_flight) < 2 and (plan := self._scheduler.schedule()) is not None:
                self._worker.submit(plan)
                self.ran += plan.num_tokens
            self.steps += 1
            list(self._scheduler.update(self._worker.collect()))
            if self.steady:
                self._top_up()
        self.preemptions = Counter({str(reason): n for reason, n in self._scheduler.preemptions.items()})
        return self

    def record(self) -> dict[str, Any]:
        again = self.known - self.found
        late = np.array(self.latencies)
        return {
            "workload": self.workload.name,
            "arrivals": "steady" if self.steady else "at once",
            "oversubscription": self.factor,
            "requests": self.done,
            "preemptions": self.preemptions.total(),
            "found": round(self.found / self.known, 4) if self.known else None,
            "run_again": round(again / self.ran, 4),
            "steps": self.steps,
            "tokens_per_step": round(self.emitted / self.steps, 2),
            "latency_mean": round(float(late.mean()), 1),
            "latency_p99": round(float(np.percentile(late, 99)), 1),
        }


def measure(only: list[str]) -> Iterator[dict[str, Any]]:
    workloads = [workload for workload in WORKLOADS if not only or workload.name in only]
    for workload, steady, factor in itertools.product(workloads, (False, True), FACTORS):
        yield Run(workload, factor, steady).run().record()


def show(records: list[dict[str, Any]]) -> None:
    table = Table()
    names = [name for name in records[0] if name not in ("date", "commit", "python", "machine")]
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for record in records:
        table.add_row(*("-" if record[name] is None else str(record[name]) for name in names))
    Console(width=200).print(table)


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Draw the share of tokens that run again, for each workload, where requests come steadily, at the newest commit
    and, dotted, at the first."""
    import matplotlib as mpl  # only here, since tests run this module without the extra
    from matplotlib import pyplot as plt

    mpl.rcParams.update({"svg.hashsalt": "ridgeline", "font.size": 9, "font.family": "DejaVu Sans"})
    figure, (again, found) = plt.subplots(1, 2, figsize=(8.2, 3.2), facecolor="white")
    commits = [record["machine"]["commit"] for record in (records[0], records[-1])]
    for place, (workload, commit) in enumerate(itertools.product(WORKLOADS, commits)):
        here = [r for r in records if r["machine"]["commit"] == commit and r["workload"] == workload.name]
        own = [record for record in here if record["arrivals"] == "steady"]
        newest = commit == commits[-1]
        style = {"color": f"C{place // len(commits)}", "linestyle": "-" if newest else ":", "marker": ".", "lw": 1.3}
        factors = [record["oversubscription"] for record in own]
        again.plot(factors, [100 * record["run_again"] for record in own], label=workload.name * newest, **style)
        seen = [record for record in own if record["found"] is not None]
        found.plot([r["oversubscription"] for r in seen], [100 * r["found"] for r in seen], **style)
    again.set(title="tokens that run again, % of all", xlabel="oversubscription of the cache", ylim=0)
    found.set(title="of preempted requests found again, %", xlabel="oversubscription of the cache", ylim=(0, 102))
    found.axhline(80, color="grey", lw=0.8)
    figure.legend(loc="center right", frameon=False, title="dotted:\n" + ", ".join(commits[:-1]))
    figure.tight_layout(rect=(0, 0, 0.86, 1))
    figure.savefig(path, metadata={"Title": "Preemption", "Date": None})


def main() -> None:
    arguments = asked(
        __doc__, only=[OneOf(workload.name for workload in WORKLOADS)],
        json=(Path, "add the records to this file, one a line"), draw=(False, "draw the stored results instead"),
    )  # fmt: skip
    if arguments.draw:
        draw([json.loads(line) for line in RESULTS.read_text().splitlines()], IMAGE)
        return
    records = list(measure(arguments.only))
    show(records)
    for record in records:
        keep(arguments.json, record)


if __name__ == "__main__":
    main()
