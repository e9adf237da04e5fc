"""Compares what a CPU can hold stable with a stored baseline, and ends with code 1 and a sentence if it moved.

    python -m ridgeline_bench.scripts.baseline                  # a sample, in seconds
    python -m ridgeline_bench.scripts.baseline --whole          # `make baseline`: every kernel that the tests compile
    python -m ridgeline_bench.scripts.baseline --whole --store  # after a change that means to move something

| kept | of | equal if |
|---|---|---|
| code | the machine code of a kernel for an architecture (`kernels.base.aot`), as a hash | the same |
| registers, spilled, shared | the same | the same |
| calls | Python's and C's calls of a step: schedule, prepare and update at 64 requests | within 1 % |
| blocks | blocks of memory that Python holds more after such a step than before it | within 16 |

Times are not kept: on a shared CPU no time is stable. Code and calls depend on versions, so a baseline holds for those
that it names: with another Triton kernels are left out, with another Python or numpy calls and blocks are, and the
report says so.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base.aot import compile_some, kernels, tasks_of
from ridgeline_bench.results import host
from ridgeline_bench.scripts.asked import asked
from ridgeline_bench.scripts.control_plane import Bench

STORE = Path("benchmarks/baseline.jsonl")
KEPT = ("code", "registers", "spilled", "shared")
SAMPLE, RUNNING, STEPS = 6, 64, 50
CALLS, BLOCKS = 0.01, 16  # how far they may move: a share, a number
SHOWN = 3  # differences in the sentence

Line = Mapping[str, Any]


def kernels_now(names: Collection[str] | None, processes: int) -> list[Line]:
    """Compile the kernels of these names, of those that the tests compile (None: all), and return a line for each."""
    tasks = [task for task in tasks_of(first=True) if names is None or name_of(*task) in names]
    found = []
    for report in compile_some(tasks, processes):
        if report.error:
            raise InvalidConfig(f"{report.kernel} does not compile for {report.arch}: {report.error}")
        kept = {name: getattr(report, name) for name in KEPT}
        found.append({"kind": "kernel", "name": f"{report.kernel} {report.arch}", **kept})
    return found


def name_of(at: int, arch: str) -> str:
    return f"{kernels()[at].name} {arch}"


def sampled(stored: list[Line], count: int) -> set[str]:
    """Return the names of so many stored kernels, evenly spread."""
    names = [line["name"] for line in stored if line["kind"] == "kernel"]
    return set(names[:: max(1, len(names) // max(1, count))][:count])


def host_now(running: int = RUNNING, steps: int = STEPS) -> list[Line]:
    """Return calls and blocks of a step of the host, on average over steps of one fixed workload."""
    torch.set_num_threads(1)
    bench = Bench(running, torch.device("cpu"))
    while bench.scheduler.num_waiting:
        bench.step()
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.collect()
    gc.disable()
    try:
        bench.step()
        before = sys.getallocatedblocks()
        for _ in range(steps):
            bench.step()
        blocks = (sys.getallocatedblocks() - before) / steps
        sys.setprofile(count)
        try:
            for _ in range(steps):
                bench.step()
        finally:
            sys.setprofile(None)
    finally:
        gc.enable()
    return [
        {"kind": "host", "name": "calls of a step", "value": calls / steps},
        {"kind": "host", "name": "blocks of a step", "value": blocks},
    ]


def versions() -> dict[str, str]:
    found = {name: metadata.version(name).partition("+")[0] for name in ("triton", "numpy", "torch")}
    return {**found, "python": f"{sys.version_info.major}.{sys.version_info.minor}"}


def compared(stored: list[Line], now: list[Line]) -> list[str]:
    """Return in words which of the lines now are not as they were stored, or were not stored."""
    before = {line["name"]: line for line in stored}
    return [words for line in now for words in _moved(before.get(line["name"]), line)]


def _moved(before: Line | None, line: Line) -> Iterator[str]:
    name = line["name"]
    if before is None:
        yield f"{name} is new"
    elif line["kind"] == "host":
        was, value = before["value"], line["value"]
        allowed = CALLS * was if name.startswith("calls") else BLOCKS
        if abs(value - was) > allowed:
            yield f"{name} are {value:.1f} instead of {was:.1f}, and may move by {allowed:.1f}"
    else:
        moved = [f"{what} {before[what]} to {line[what]}" for what in KEPT[1:] if before[what] != line[what]]
        if moved or before["code"] != line["code"]:
            yield f"the code of {name} changed" + (f" ({', '.join(moved)})" if moved else "")


def gone(wanted: Collection[str], now: list[Line]) -> list[str]:
    """Return in words which of the kernels that were wanted there are no more."""
    return [f"{name} is gone" for name in wanted if name not in {line["name"] for line in now}]


def read(path: Path) -> tuple[Line, list[Line]]:
    """Return the versions that a baseline was stored with, and its lines. Raise InvalidConfig."""
    try:
        about, *lines = [json.loads(line) for line in path.read_text().splitlines()]
        return about["versions"], lines
    except (OSError, ValueError, KeyError) as error:
        raise InvalidConfig(f"{path} is no baseline ({error}); store one with --whole --store.") from error


def comparable(stored: Line) -> dict[str, str]:
    """Return the kinds that can be compared with these versions → "", and of the others why not."""
    own = versions()
    differ = {name: f"{name} {stored.get(name)} then, {own[name]} now" for name in own if stored.get(name) != own[name]}
    host = [differ[name] for name in ("python", "numpy", "torch") if name in differ]
    return {"kernel": differ.get("triton", ""), "host": "; ".join(host)}


def sentence(moved: list[str]) -> str:
    more = f" and {len(moved) - SHOWN} more" if len(moved) > SHOWN else ""
    return (
        f"baseline: {'; '.join(moved[:SHOWN])}{more}. If that is meant, store it anew: "
        "python -m ridgeline_bench.scripts.baseline --whole --store"
    )


def main() -> None:
    a = asked(
        __doc__,
        whole=(False, "all kernels that the tests compile, and not a sample"),
        store=(False, "store instead of comparing"),
        path=(STORE, "the baseline"),
        sample=(SAMPLE, "kernels of a sample"),
        processes=(2, "processes that compile"),
    )
    if a.store:
        if not a.whole:
            raise SystemExit("baseline: a sample cannot be stored; add --whole.")
        lines = [*kernels_now(None, a.processes), *host_now()]
        about: dict[str, Any] = {
            "kind": "about",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
        }
        about["machine"] = asdict(host())
        a.path.write_text("".join(f"{json.dumps(line)}\n" for line in [about, *lines]))
        print(f"baseline: stored {len(lines)} lines in {a.path}")
        return
    try:
        stored_with, stored = read(a.path)
    except InvalidConfig as error:
        raise SystemExit(f"baseline: {error}") from error
    able = comparable(stored_with)
    wanted = sampled(stored, len(stored) if a.whole else a.sample)
    now = [] if able["kernel"] else kernels_now(None if a.whole else wanted, a.processes)
    missing = [] if able["kernel"] else gone(sorted(wanted), now)
    now += [] if able["host"] else host_now()
    for kind, why in able.items():
        if why:
            print(f"baseline: not compared: {kind} ({why})")
    if moved := compared(stored, now) + missing:
        raise SystemExit(sentence(moved))
    print(f"baseline: {len(now)} of {len(stored)} lines are as stored")


if __name__ == "__main__":
    main()
