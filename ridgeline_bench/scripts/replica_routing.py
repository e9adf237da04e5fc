"""A simulation of ways to choose a replica: how much of the prompts is found cached, and how uneven the load becomes.

    python -m ridgeline_bench.scripts.replica_routing

200 conversations of 8 turns share a system prompt of 256 tokens. Each turn adds 50 to 600 tokens, and 20 to 400 are
written. They run on 4 replicas whose caches never forget. Prompts take 2000 tokens a second, and decoding slows down as
the load grows. Nothing here is measured; the figures compare rules, not machines.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count

from ridgeline.core.plan.routing import Router

REPLICAS, CONVERSATIONS, TURNS, SYSTEM = 4, 200, 8, 256
PROMPT_SPEED, TOKEN_SECONDS, HALF_SPEED = 2000.0, 0.02, 60_000.0  # the load at which decoding is half as fast

Choice = Callable[[list[int], dict[int, float]], int]


def simulate(choose: Choice, seed: int = 0) -> tuple[float, float]:
    """Return the share of prompt tokens found cached, and the mean of the busiest replica's load ÷ all loads' mean."""
    draw = random.Random(seed)
    caches = [Router(1) for _ in range(REPLICAS)]  # what is known there is what was sent there
    texts = [list(range(SYSTEM)) for _ in range(CONVERSATIONS)]
    loads = dict.fromkeys(range(REPLICAS), 0.0)
    arrivals = [(draw.uniform(0, 50), number, 0) for number in range(CONVERSATIONS)]
    heapq.heapify(arrivals)
    running: list[tuple[float, int, float]] = []
    asked = cached = 0
    uneven: list[float] = []
    while arrivals:
        now, number, turn = heapq.heappop(arrivals)
        while running and running[0][0] <= now:
            _, replica, weight = heapq.heappop(running)
            loads[replica] -= weight
        prompt = texts[number]
        prompt += [1000 + 7 * number + turn] * draw.randint(50, 600)
        replica, written = choose(prompt, loads), draw.randint(20, 400)
        found = caches[replica].cached(0, prompt, "")
        caches[replica].choose(prompt, "", {0: 0.0})
        asked, cached = asked + len(prompt), cached + found
        weight = len(prompt) + min(written, 256)
        loads[replica] += weight
        uneven.append(max(loads.values()) * REPLICAS / sum(loads.values()))
        seconds = (len(prompt) - found) / PROMPT_SPEED + written * TOKEN_SECONDS * (1 + loads[replica] / HALF_SPEED)
        heapq.heappush(running, (now + seconds, replica, weight))
        prompt += [2000 + number] * written
        if turn + 1 < TURNS:
            heapq.heappush(arrivals, (now + seconds + draw.uniform(0, 10), number, turn + 1))
    return cached / asked, sum(uneven) / len(uneven)


def main() -> None:
    router, turns = Router(REPLICAS), count()
    ways: dict[str, Choice] = {
        "in turn": lambda prompt, loads: next(turns) % REPLICAS,
        "least loaded": lambda prompt, loads: min(loads, key=lambda replica: loads[replica]),
        "by known beginnings": lambda prompt, loads: router.choose(prompt, "", loads),
    }
    for name, choose in ways.items():
        cached, uneven = simulate(choose)
        print(f"{name:20} {cached:5.1%} of prompts cached, busiest replica {uneven:.2f} times the mean")


if __name__ == "__main__":
    main()
