"""The host time of the scheduler alone in one step: a plan made, and its result taken, beside many requests that wait.

    python -m ridgeline_bench.scripts.scheduler_steps [--waiting 0 10000 100000] [--json FILE] [--policies fcfs vtc]

Scheduler, cache and policy are the engine's own; a worker gives one token to every row at once. 256 requests of 20
tenants run, and so many others wait. There are four loads:

    decode   no request ends; every sixteenth plan all rows need a block
    ends     outputs of 100 to 300 tokens behind prompts of 128, so in the mean 1.3 requests end, and as many start, in
             each step; a new one comes to wait for each that ends
    two      the same with outputs of 64 to 192 tokens: 2 requests end in a step
    all      outputs of 128 tokens that begin and end together: all 256 end in one step, and as many start in the next
             one, so the longest step counts; divided by 256 it is the time of an end and a start

Times are of the processor, and policies take turns, so that other work on the machine disturbs all alike.
"""

from __future__ import annotations

import gc
import json
import random
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from ridgeline.core.plan.request import Request, SamplingParams
from ridgeline.core.plan.step import Finish, StepResult
from ridgeline.core.settings.config import EngineConfig
from ridgeline.core.settings.policies import PolicySettings
from ridgeline.core.specs.cache_layout import CacheGroup, CacheLayout
from ridgeline.core.specs.state import KVSpec
from ridgeline.engine.policy import POLICIES
from ridgeline.engine.price import Price
from ridgeline.engine.scheduler import Scheduler
from ridgeline_bench.scripts.asked import asked

RUNNING, TENANTS, PROMPT = 256, 20, 128
LOADS = {"decode": (4000, 4000), "ends": (100, 300), "two": (64, 192), "all": (128, 128)}  # tokens of outputs


class Load:
    """A scheduler with 256 requests that run and others that wait."""

    def __init__(self, policy: str, waiting: int, kind: str, block_size: int = 16) -> None:
        spec = KVSpec(num_kv_heads=2, head_dim=64)
        layout = CacheLayout(
            groups=(CacheGroup(spec=spec, layers=(0,)),),
            block_size=block_size,
            dtype="bfloat16",
            num_pages=RUNNING * 1024 // block_size,
        )
        self.now = 0.0
        config = EngineConfig(
            max_model_len=8192,
            max_num_seqs=RUNNING,
            max_num_batched_tokens=RUNNING * (PROMPT + 1) if kind == "all" else 8192,
            scheduling_policy=policy,
            policy=PolicySettings(slo_ttft=3600.0),
        )
        self.scheduler = Scheduler(config, layout, None, lambda: self.now)
        self.scheduler._policy.price = Price(row=0.05, token=0.01)
        self._draw, self._tokens, self._came = random.Random(0), LOADS[kind], 0
        self._prompts = [tuple(self._draw.randrange(50_000) for _ in range(PROMPT)) for _ in range(2048)]
        for _ in range(RUNNING):
            self._come(first=True)
        while self.scheduler.running.prefilling or self.scheduler.num_waiting:
            self.step()
        self._waiting = waiting
        self.top_up()

    def _come(self, *, first: bool = False) -> None:
        n = self._came
        self._came += 1
        low, high = self._tokens
        tokens = self._draw.randint(16 if first and low < high else low, high)
        request = Request(
            id=f"r{n}",
            prompt_token_ids=(n, *self._prompts[n % len(self._prompts)]),
            params=SamplingParams(max_tokens=tokens),
            seed=0,
            max_total_tokens=PROMPT + 1 + tokens,
            owner=f"t{n % TENANTS}",
            priority=n % 3 if not first else 0,
            arrival=self.now,
        )
        self.scheduler.add(request)

    def top_up(self) -> None:
        """Let new requests come for those that have started."""
        while self.scheduler.num_running + self.scheduler.num_waiting < RUNNING + self._waiting:
            self._come()

    def step(self) -> tuple[float, float]:
        """Return the microseconds of processor time of a plan, and of its result."""
        started = time.thread_time()
        plan = self.scheduler.schedule()
        planned = time.thread_time()
        assert plan is not None
        self.now += 0.02
        ends_R = plan.kv_bound_R >= self.scheduler.slots.last_kv_len[plan.rows.slots_R]
        emitted_R = (plan.rows.num_logits_R > 0).astype(np.int32)
        finish_R = np.where(ends_R & (emitted_R > 0), np.int8(Finish.LENGTH), np.int8(0))
        tokens_RK = np.where(emitted_R > 0, 5, -1).astype(np.int32)[:, None]
        result = StepResult(plan_id=plan.id, tokens_RK=tokens_RK, emitted_R=emitted_R, finish_R=finish_R)
        came = time.thread_time()
        self.scheduler.update(result)
        return 1e6 * (planned - started), 1e6 * (time.thread_time() - came)

    def measure(self, steps: int) -> list[tuple[float, float]]:
        """Return the times of so many steps, without those of the garbage collector."""
        found = list[tuple[float, float]]()
        gc.disable()
        for _ in range(steps):
            found.append(self.step())
            self.top_up()
        gc.enable()
        return found


def main() -> None:
    a = asked(
        __doc__,
        waiting=([0, 10_000, 100_000], "requests that wait"),
        policies=([*POLICIES], "policies"),
        loads=([*LOADS], "loads"),
        steps=(160, "steps of a round"),
        rounds=(3, "rounds"),
        block_size=(16, "tokens of a block: 16 as on a CPU, 64 as on a GPU"),
        json=("", "file to which a line is added for each"),
        commit=("", "what was measured"),
    )
    found = defaultdict[tuple[str, str, int], list[tuple[float, float]]](list)
    for kind in a.loads:
        for waiting in a.waiting:
            loads = {policy: Load(policy, waiting, kind, a.block_size) for policy in a.policies}
            gc.freeze()
            for _ in range(a.rounds):
                for policy, load in loads.items():
                    found[kind, policy, waiting] += load.measure(a.steps)
            gc.unfreeze()
    table = Table(
        "load", "policy", "waiting", "plan, median", "result", "step, median", "mean", "99th percentile", "longest"
    )
    for (kind, policy, waiting), times in found.items():
        plan_N, result_N = np.array(times).T
        step_N = plan_N + result_N
        figures = {
            "plan": np.median(plan_N),
            "result": np.median(result_N),
            "step": np.median(step_N),
            "mean": step_N.mean(),
            "p99": np.percentile(step_N, 99),
            "longest": step_N.max(),
        }
        table.add_row(kind, policy, str(waiting), *(f"{value:.0f}" for value in figures.values()))
        if a.json:
            line = {"load": kind, "policy": policy, "waiting": waiting, "running": RUNNING, "commit": a.commit}
            line["block_size"] = a.block_size
            line |= {name: round(float(value), 1) for name, value in figures.items()}
            with Path(a.json).open("a") as file:
                file.write(json.dumps(line) + "\n")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
