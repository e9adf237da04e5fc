"""The time that adapters take, measured in the process of an engine that runs with them.

A decode step is timed as the difference of two runs of the same requests, to their first tokens and to their last. The
prefix cache has the prompts by then. Rounds alternate between requests with adapters and without, so a drifting machine
slows both alike.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ridgeline_bench.engines import Adapter, AdapterEngine
from ridgeline_bench.workloads import Metric, Size

WITH, WITHOUT = "adapters", "none"
BRIEF = 16  # tokens of the prompts of requests that wait for an adapter

Run = Callable[[Sequence[Sequence[int]], int, Sequence[Adapter] | None], float]


def measured(
    engine: AdapterEngine, size: Size, asked: Mapping[str, Any], synchronize: Callable[[], None] = lambda: None
) -> Iterator[Metric]:
    """Yield the figures of a task (`steps` or `pages`), which `asked` names beside its sizes."""
    folders = [Adapter(number, folder) for number, folder in enumerate(asked["folders"], 1)]

    def run(prompts: Sequence[Sequence[int]], tokens: int, adapters: Sequence[Adapter] | None) -> float:
        """Return the seconds of these requests. Raise RuntimeError if they got fewer tokens."""
        synchronize()
        began = time.perf_counter()
        counts = engine.generate(prompts, [tokens] * len(prompts), 0.0, adapters)
        synchronize()
        if counts != [tokens] * len(prompts):
            raise RuntimeError(f"requests asked for {tokens} tokens each and got {counts}.")
        return time.perf_counter() - began

    yield from TASKS[asked["task"]](run, size, asked, folders)


def steps(run: Run, size: Size, asked: Mapping[str, Any], adapters: Sequence[Adapter]) -> Iterator[Metric]:
    """Yield milliseconds of a decode step with adapters and without.

    batches: requests of `input_len` tokens, all with the first adapter; as many samples as `rounds`, each the mean of
    `steps` steps. different: so many requests of `context` tokens, each with an adapter of its own; 0: none.
    """
    draw, one = random.Random(0), adapters[0]
    cases = [(f"{count} with one", asked["input_len"], [one] * count) for count in asked["batches"]]
    if count := asked["different"]:
        cases.append((f"{count} with {count}", asked["context"], list(adapters[:count])))
    for name, length, own in cases:
        prompts = [size.tokens(length, draw) for _ in own]
        ways = {WITHOUT: None, WITH: own}
        for way in ways.values():
            run(prompts, 1 + asked["steps"], way)
        samples: dict[str, list[float]] = {way: [] for way in ways}
        for _, kind in itertools.product(range(asked["rounds"]), ways):
            first = run(prompts, 1, ways[kind])
            samples[kind].append(1e3 * (run(prompts, 1 + asked["steps"], ways[kind]) - first) / asked["steps"])
        for kind, found in samples.items():
            yield Metric(f"step of {name}: {kind}", statistics.median(found), "ms", samples=tuple(found))


def pages(run: Run, size: Size, asked: Mapping[str, Any], adapters: Sequence[Adapter]) -> Iterator[Metric]:
    """Yield milliseconds that single requests with one token wait for an adapter: that of the request before, one of
    `held` that the host's memory has, and one that is read from its folder. The device has room for one adapter, and
    the host for fewer than there are and for more than `held`. A plain read of the file stands beside."""
    draw = random.Random(0)

    def times(turns: Sequence[Adapter]) -> list[float]:
        for each in turns:
            run([size.tokens(BRIEF, draw)], 1, [each])
        return [1e3 * run([size.tokens(BRIEF, draw)], 1, [each]) for _ in range(asked["rounds"]) for each in turns]

    there = times(adapters[:1])
    base = statistics.median(there)
    yield Metric("request, adapter there", base, "ms", samples=tuple(there))
    for name, turns in (("host", adapters[: asked["held"]]), ("disk", adapters)):
        found = [each - base for each in times(turns)]
        yield Metric(f"page-in from {name}", statistics.median(found), "ms", samples=tuple(found))
    read = [1e3 * _read_seconds(Path(each.folder)) for each in adapters]
    yield Metric("read of the file", statistics.median(read), "ms", samples=tuple(read))


def _read_seconds(folder: Path) -> float:
    began = time.perf_counter()
    (folder / "adapter_model.safetensors").read_bytes()
    return time.perf_counter() - began


TASKS = {"steps": steps, "pages": pages}
