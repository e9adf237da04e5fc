"""The rules of torch's caching allocator, each shown by requests whose outcome a model has predicted.

    python -m ridgeline_bench.scripts.allocator.rules [--output FILE.jsonl] [--commit HASH]     # one GPU, a minute

Every way of setting PYTORCH_ALLOC_CONF runs in a process of its own. In it every scenario runs three times: event by
event beside the model, under torch's profiler, which counts the calls of the driver as CUPTI sees them, and against the
clock. Without a GPU what the model says is printed.

A line has, for each scenario and way: the peaks of bytes asked for, in blocks, and held; calls that took memory of the
driver or gave it back, by the allocator's own count; events after which the allocator held what the model says; and
microseconds of the scenario. A first line of a way has the times of single calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ridgeline_bench.results import host_with
from ridgeline_bench.scripts.allocator.model import MIB, CachingModel, Held
from ridgeline_bench.scripts.allocator.scenarios import ASYNC, SCENARIOS, SETTINGS, Scenario, Walk, walk
from ridgeline_bench.scripts.asked import asked, keep

DRIVER = ("cudaMalloc", "cudaFree", "cudaMallocAsync", "cudaFreeAsync", "cudaMemPoolTrimTo")
CALLS = ("mallocs", "frees", "retries")  # the model's and torch's, at the end of a scenario
CYCLES = 200_000_000  # of a kernel that keeps a stream busy, 0.1 s
SECONDS = 120  # that a way may take


class TorchAllocator:
    """The allocator of torch on a GPU, from what it holds now on. native: torch's own, of which a snapshot is known."""

    def __init__(self, *, native: bool) -> None:
        self.native = native
        self.streams = (torch.cuda.current_stream(), torch.cuda.Stream())
        self.other = torch.cuda.Stream()
        self.tensors: dict[str, Tensor] = {}
        self.give_back()
        self._before = Held(*(0,) * 8)
        self._before = self.held()

    def allocate(self, name: str, size: int, stream: int = 0) -> None:
        with torch.cuda.stream(self.streams[stream]):
            self.tensors[name] = torch.empty(size, dtype=torch.uint8, device="cuda")

    def use(self, name: str) -> None:
        with torch.cuda.stream(self.other):
            torch.cuda._sleep(CYCLES)
        self.tensors[name].record_stream(self.other)

    def free(self, name: str) -> None:
        del self.tensors[name]

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def give_back(self) -> None:
        torch.cuda.empty_cache()

    def held(self) -> Held:
        stats = torch.cuda.memory_stats()
        blocks = [each for segment in torch.cuda.memory_snapshot() for each in segment["blocks"]] if self.native else []
        free = [each["size"] for each in blocks if each["state"] == "inactive"]
        found = Held(
            requested=stats.get("requested_bytes.all.current", 0),
            allocated=stats.get("allocated_bytes.all.current", 0),
            reserved=stats.get("reserved_bytes.all.current", 0),
            mallocs=stats.get("num_device_alloc", 0),
            frees=stats.get("num_device_free", 0),
            retries=stats.get("num_alloc_retries", 0),
            largest_free=max(free, default=0),
            free=sum(free),
        )
        return found._replace(**{name: getattr(found, name) - getattr(self._before, name) for name in CALLS})


def predicted(setting: str, scenario: Scenario) -> Walk | None:
    """Return what the model holds after each event, None for an allocator that is not its own."""
    if setting not in SETTINGS:
        return None
    return walk(CachingModel(replace(SETTINGS[setting], limit=scenario.limit)), scenario.events)


def compared(found: Walk, model: Walk | None) -> dict[str, Any]:
    """Return how many events left what the model says, and the first one that did not."""
    if model is None:
        return {}
    differs = []
    for at, (a, b) in enumerate(zip(model.held, found.held, strict=True)):
        pairs = zip(a._fields, a, b, strict=True)
        if other := {name: [x, y] for name, x, y in pairs if x != y and name not in CALLS}:
            differs.append({"event": at, "model_and_found": other})
    ends = model.held[-1], found.held[-1]
    return {
        "events": len(found.held), "as_predicted": len(found.held) - len(differs), "first_other": differs[:1],
        "calls": {name: [getattr(each, name) for each in ends] for name in CALLS},
    }  # fmt: skip


def counted(run: Callable[[], None]) -> dict[str, int]:
    """Return the calls of the driver's memory that CUPTI sees."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    calls = Counter(each.name for each in seen.events())
    return {name: count for name, count in calls.items() if name in DRIVER or name.startswith(("cuMem", "cudaMem"))}


def lines_of(setting: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a way, in the process that has it."""
    native = setting != ASYNC
    device = torch.device("cuda")
    torch.ones(1, device=device)  # the context
    total = torch.cuda.get_device_properties(device).total_memory
    yield {"what": "single calls", **single_calls()}
    for name, scenario in SCENARIOS.items():
        if scenario.limit and not native:
            continue  # the limit is the caching allocator's own
        allocator = TorchAllocator(native=native)
        events, held = scenario.events, allocator.held()
        if scenario.limit:
            torch.cuda.set_per_process_memory_fraction((held.reserved + scenario.limit + MIB) / total)
        found = walk(allocator, events)
        found = Walk([_beyond(each, held) for each in found.held])

        allocator.give_back()
        calls = counted(partial(_run, allocator, scenario))
        allocator.give_back()
        torch.cuda.synchronize()
        began = time.perf_counter()
        _run(allocator, scenario)
        seconds = time.perf_counter() - began
        torch.cuda.set_per_process_memory_fraction(1.0)
        end = found.held[-1]
        yield {
            "what": name,
            "requested": walk(CachingModel(), events).peak_requested,
            "allocated": found.peak_allocated, "reserved": found.peak_reserved, "mallocs": end.mallocs,
            "frees": end.frees, "retries": end.retries,
            "driver_calls": calls, "microseconds": 1e6 * seconds,
            **compared(found, predicted(setting, scenario)),
            **({"each": [each.reserved for each in found.held[::3]]} if name == "sizes" else {}),
        }  # fmt: skip


def _run(allocator: TorchAllocator, scenario: Scenario) -> None:
    for event in scenario.events:
        event.of(allocator)


def _beyond(held: Held, before: Held) -> Held:
    """Return what is held beyond what was held before the first event."""
    names = ("requested", "allocated", "reserved", "free")
    return held._replace(**{name: getattr(held, name) - getattr(before, name) for name in names})


def single_calls(count: int = 200) -> dict[str, float]:
    """Return the microseconds of a request that finds a free block and of one that does not, each with what gives the
    memory back."""

    def hit() -> None:
        torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")

    def miss() -> None:
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()

    kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    found = {}
    for name, run, times in (("hit_us", hit, count), ("miss_us", miss, count // 10)):
        run()
        samples = []
        for _ in range(times):
            torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            samples.append(1e6 * (time.perf_counter() - began))
        found[name] = median(samples)
    del kept
    return found


def run_apart(setting: str, commit: str, output: Path) -> str:
    """Run a way in a process of its own, which adds its lines to a file. Return what went wrong, "" if nothing did."""
    settings = f"backend:{ASYNC}" if setting == ASYNC else SETTINGS[setting].text
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": settings, "PYTORCH_CUDA_ALLOC_CONF": settings}
    command = [sys.executable, "-m", "ridgeline_bench.scripts.allocator.rules", "--setting", setting]
    command += ["--commit", commit, "--output", str(output)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    return "" if ended.returncode == 0 else ended.stderr[-1500:]


def table_of(lines: list[dict[str, Any]]) -> Table:
    """Return the lines as a table, in MiB."""
    table = Table("scenario", "way", "asked", "blocks", "held", "mallocs", "frees", "as predicted", "us")
    for line in lines:
        if line["what"] == "single calls":
            continue
        share = f"{line['as_predicted']}/{line['events']}" if "events" in line else ""
        sizes = (f"{line[name] / MIB:,.0f}" for name in ("requested", "allocated", "reserved"))
        table.add_row(
            line["what"], line["setting"], *sizes, str(line["mallocs"]), str(line["frees"]), share,
            f"{line['microseconds']:,.0f}" if "microseconds" in line else "",
        )  # fmt: skip
    return table


def model_lines() -> Iterator[dict[str, Any]]:
    """Yield the lines as the model predicts them."""
    for name, scenario in SCENARIOS.items():
        for setting in SETTINGS:
            if (found := predicted(setting, scenario)) is not None:
                end = found.held[-1]
                yield {
                    "what": name, "setting": setting, "requested": found.peak_requested,
                    "allocated": found.peak_allocated, "reserved": found.peak_reserved, "mallocs": end.mallocs,
                    "frees": end.frees,
                }  # fmt: skip


def main() -> None:
    given = asked(__doc__, setting=("", "a way, in this process"), commit="", output=Path)
    if not torch.cuda.is_available():
        Console(width=140).print(table_of(list(model_lines())))
        return
    if given.setting:
        here = asdict(host_with(torch.device("cuda"), given.commit))
        for line in lines_of(given.setting):
            keep(given.output, {"machine": here, "workload": "allocator rules", "setting": given.setting, **line})
        return
    broken = ""
    with tempfile.TemporaryDirectory() as folder:
        output = given.output or Path(folder) / "rules.jsonl"
        before = output.read_text().count("\n") if output.exists() else 0
        for setting in (*SETTINGS, ASYNC):
            if wrong := run_apart(setting, given.commit, output):
                print(f"{setting}: {wrong}", file=sys.stderr)
                broken = setting
        lines = [json.loads(line) for line in output.read_text().splitlines()[before:]]
    Console(width=140).print(table_of(lines))
    if broken:
        raise SystemExit(f"{broken} did not end well.")


if __name__ == "__main__":
    main()
