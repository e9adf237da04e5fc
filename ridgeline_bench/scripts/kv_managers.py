"""Managers of a fleet's KV caches beside each other: servers for themselves, a router that guesses, an index, a store.

    python -m ridgeline_bench.scripts.kv_managers [--requests 2000] [--seeds 1 2] [--output FILE.jsonl]
    python -m ridgeline_bench.scripts.kv_managers --servers 3 [--prompts 48] [--rounds 2] [--output FILE.jsonl]

The first line simulates eight H200 with Llama-3.1-8B, the second runs servers of the embedded model on this CPU.

    alone       requests go round, and each server has a cache of its own
    guessed     decentral: the router sends a prompt where it sent its beginning before; it asks no server
    indexed     central: one index knows what each cache holds at the moment of the choice (simulated only)
    expected    the same, and prompts of open requests count as if they were there
    store       central: requests go to the least loaded server, and all servers read and write one store below their
                caches: a directory that they share, or, simulated, one of --rate GB/s
    both        guessed, above that store

shared     one of 150 beginnings of 6,000 tokens, and 1,200 tokens more (simulated); `routed`'s prompts (servers)
agents     W6: 40 sessions of twelve turns
random     100 to 3,000 tokens that share nothing
"""

from __future__ import annotations

import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ridgeline.core.plan.request import RequestStats
from ridgeline.core.plan.routing import FACTOR, WORTH
from ridgeline.perf.hardware import find
from ridgeline.routing import RoutingRule
from ridgeline.simulation.figures import FleetFigures
from ridgeline.simulation.fleet import Fleet, FleetSettings
from ridgeline.simulation.setup import Settings, Setup
from ridgeline.simulation.traffic import Ask, Listed, Traffic
from ridgeline.weights.loader import read_model_config
from ridgeline_bench.scripts.asked import asked, keep
from ridgeline_bench.scripts.batching import SHAPES
from ridgeline_bench.scripts.routed import prompts, rate
from ridgeline_bench.scripts.served import Served
from ridgeline_bench.serving.asks import asks
from ridgeline_bench.serving.sessions import Agents
from ridgeline_bench.serving.work import Lengths, Work

REPLICAS, KV_TOKENS, HOST_GIB, STORE_GIB = 8, 400_000, 64.0, 2000.0
RULES = {
    "alone": "round-robin",
    "guessed": "prefix",
    "indexed": "prefix",
    "expected": "prefix",
    "store": "least",
    "both": "prefix",
}
STORED = ("store", "both")
LOADS = ("shared", "agents", "random")


class Indexed(Fleet):
    """A fleet whose router knows at each moment what every cache holds. The rule is `core.plan.routing`'s. expects:
    it counts on the prompts of open requests as well, which are not computed yet."""

    expects = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._open = [Counter[bytes]() for _ in self.replicas]
        self._at: dict[int, int] = {}

    def _chosen(self, ask: Ask, rule: RoutingRule, pool: range) -> int | None:
        up = [number for number in pool if self.replicas[number].up]
        loads = {number: self.replicas[number].load.tokens for number in up}
        hits = {number: self._hit(number, self._prompts.hashes(ask.prompt)) for number in up}
        fit = [number for number in up if loads[number] <= FACTOR * min(loads.values()) + WORTH * hits[number]]
        return min(fit, key=lambda number: (-hits[number], loads[number], number), default=None)

    def _hit(self, number: int, hashes: Sequence[bytes]) -> int:
        index, coming = self.replicas[number].engine.scheduler.cache.index, self._open[number]
        for n, node_hash in enumerate(hashes):
            node = index.get(node_hash)
            if node is None and not (self.expects and node_hash in coming):
                return n * self._setup.layout.block_size
        return len(hashes) * self._setup.layout.block_size

    def _give(self, ask: Ask, chosen: int) -> None:
        self._at[ask.number] = chosen
        self._open[chosen].update(self._prompts.hashes(ask.prompt))
        super()._give(ask, chosen)

    def _ended(self, ask: Ask, stats: RequestStats, over: int) -> None:
        self._open[self._at.pop(ask.number)] -= Counter(self._prompts.hashes(ask.prompt))
        super()._ended(ask, stats, over)


class Expecting(Indexed):
    expects = True


FLEETS: dict[str, type[Fleet]] = {"indexed": Indexed, "expected": Expecting}


def traffic(load: str, requests: int, seed: int) -> Traffic:
    if load == "agents":
        return Agents(sessions=40, turns=12, rate=8.0, time_scale=0.1, seed=seed)
    if load == "shared":
        lengths: dict[str, Any] = {"input_len": Lengths(1200, 1200), "prefix_tokens": 6000, "prefix_groups": 150}
    else:
        lengths = {"input_len": Lengths(100, 3000)}
    return Listed(asks(Work(count=requests, output_len=Lengths(100, 100), seed=seed, **lengths), 200.0))


def simulated(manager: str, load: str, a: Any, seed: int) -> FleetFigures:
    """Return the figures of a manager. All have as much of the hosts' memory."""
    below = {"kv_disk_size": STORE_GIB, "kv_disk_rate": a.rate, "kv_disk_shared": True} if manager in STORED else {}
    given = Settings(kv_tokens=KV_TOKENS, kv_offloading_size=HOST_GIB, **below)
    setup = Setup(read_model_config(SHAPES / "llama-8b").spec, find("H200").attained(), "bfloat16", given)
    return FLEETS.get(manager, Fleet)(
        setup, FleetSettings(replicas=REPLICAS, routing=RULES[manager]), traffic(load, a.requests, seed)
    ).run()


def simulate(a: Any) -> Iterator[dict[str, Any]]:
    """Yield a line for each load and manager: medians over the seeds."""
    for load in a.loads:
        for manager in a.managers:
            found = [simulated(manager, load, a, seed) for seed in a.seeds]
            figures = {
                "requests_per_second": [each.request_rate for each in found],
                "ttft_p50_ms": [each.ttft.p50 for each in found],
                "ttft_p99_ms": [each.ttft.p99 for each in found],
                "found": [each.hit_rate for each in found],
                "found_in_store": [each.disk_hit_rate for each in found],
                "ideal": [each.ideal_hit_rate for each in found],
            }
            medians = {name: statistics.median(values) for name, values in figures.items()}
            yield {"kind": "simulated", "load": load, "manager": manager, "seeds": a.seeds, **medians}


def served(a: Any) -> Iterator[dict[str, Any]]:
    """Yield a line for each manager and round, of servers of this machine. Those with a store start with an empty
    one."""
    plain: tuple[str, ...] = (
        "--device",
        "cpu",
        "--kv-cache-memory",
        a.cache,
        "--max-num-seqs",
        "4",
        "--log-level",
        "error",
    )
    plain += ("--kv-offloading-size", "0.05")
    for stored in (False, True):
        managers = [name for name in a.managers if (name in STORED) == stored and name not in FLEETS]
        if not managers:
            continue
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "kv"
            flags = ("--kv-disk", str(folder), "--kv-disk-size", "2") if stored else ()
            servers = [stack.enter_context(Served(*plain, *flags)) for _ in range(a.servers)]
            for number in range(a.rounds):
                for manager in managers[:: -1 if number % 2 else 1]:
                    own = f"# {manager}, {number}\n"  # so that no cache knows them
                    given = [own + each for each in prompts("shared", a.prompts, number + 1)]
                    found = rate(servers, RULES[manager], given)
                    yield {"kind": "served", "manager": manager, "round": number, "requests_per_second": found}


def shown(line: Mapping[str, Any]) -> str:
    if line["kind"] == "served":
        return f"{line['manager']:8} round {line['round']}: {line['requests_per_second']:.2f} requests/s"
    return (
        f"{line['load']:7} {line['manager']:8} {line['requests_per_second']:6.1f} requests/s, TTFT "
        f"{line['ttft_p50_ms']:.0f} / {line['ttft_p99_ms']:.0f} ms, found {line['found']:.1%} of {line['ideal']:.1%}, "
        f"in the store {line['found_in_store']:.1%}"
    )


def lines(a: Any) -> Iterator[dict[str, Any]]:
    return served(a) if a.servers else simulate(a)


def main() -> None:
    a = asked(
        __doc__, requests=2000, seeds=[1, 2], loads=list(LOADS), managers=list(RULES),
        rate=(25.0, "GB/s of the store, of all servers together"), servers=(0, "0: simulate"), prompts=48, rounds=2,
        cache=("24M", "of keys and values, a server"), output=Path,
    )  # fmt: skip
    about = {
        "workload": "kv managers",
        "replicas": a.servers or REPLICAS,
        "requests": a.prompts if a.servers else a.requests,
    }
    for line in lines(a):
        print(shown(line), flush=True)
        keep(a.output, {**about, **({} if a.servers else {"store_gb_s": a.rate}), **line})


if __name__ == "__main__":
    main()
