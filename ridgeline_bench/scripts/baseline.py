"""Compares what a step of the host costs with a stored baseline, and ends with code 1 and a sentence if it moved.

    python -m ridgeline_bench.scripts.baseline            # `make baseline`: seconds
    python -m ridgeline_bench.scripts.baseline --store    # after a change that means to move something

| kept | of | equal if |
|---|---|---|
| calls | Python's and C's calls of a step: schedule, prepare and update at 64 requests | within 1 % |
| blocks | blocks of memory that Python holds more after such a step than before it | within 16 |

Times are not kept: on a shared CPU no time is stable. Calls depend on versions, so a baseline holds for those that it
names: with another Python, torch or numpy nothing is compared, and the report says so. What kernels compile to is kept
beside the tests (`tests/kernels/compiled.py`).
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.results import host
from ridgeline_bench.scripts.asked import asked
from ridgeline_bench.scripts.control_plane import Bench

STORE = Path("benchmarks/baseline.jsonl")
RUNNING, STEPS = 64, 50
CALLS, BLOCKS = 0.01, 16  # how far they may move: a share, a number

Line = Mapping[str, Any]


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
        {"name": "calls of a step", "value": calls / steps},
        {"name": "blocks of a step", "value": blocks},
    ]


def versions() -> dict[str, str]:
    found = {name: metadata.version(name).partition("+")[0] for name in ("numpy", "torch")}
    return {**found, "python": f"{sys.version_info.major}.{sys.version_info.minor}"}


def compared(stored: list[Line], now: list[Line]) -> list[str]:
    """Return in words which of the lines now are not as they were stored, or were not stored."""
    before = {line["name"]: line for line in stored}
    return [words for line in now for words in _moved(before.get(line["name"]), line)]


def _moved(before: Line | None, line: Line) -> Iterator[str]:
    name, value = line["name"], line["value"]
    if before is None:
        yield f"{name} is new"
        return
    was = before["value"]
    allowed = CALLS * was if name.startswith("calls") else BLOCKS
    if abs(value - was) > allowed:
        yield f"{name} are {value:.1f} instead of {was:.1f}, and may move by {allowed:.1f}"


def read(path: Path) -> tuple[Line, list[Line]]:
    """Return the versions that a baseline was stored with, and its lines. Raise InvalidConfig."""
    try:
        about, *lines = [json.loads(line) for line in path.read_text().splitlines()]
        return about["versions"], lines
    except (OSError, ValueError, KeyError) as error:
        raise InvalidConfig(f"{path} is no baseline ({error}); store one with --store.") from error


def differ(stored: Line) -> str:
    """Return in words which versions are not those that a baseline was stored with ("": none)."""
    own = versions()
    return "; ".join(f"{n} {stored.get(n)} then, {own[n]} now" for n in sorted(own) if stored.get(n) != own[n])


def main() -> None:
    a = asked(__doc__, store=(False, "store instead of comparing"), path=(STORE, "the baseline"))
    if a.store:
        lines = host_now()
        about: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions()}
        about["machine"] = asdict(host())
        a.path.write_text("".join(f"{json.dumps(line)}\n" for line in [about, *lines]))
        print(f"baseline: stored {len(lines)} lines in {a.path}")
        return
    try:
        stored_with, stored = read(a.path)
    except InvalidConfig as error:
        raise SystemExit(f"baseline: {error}") from error
    if why := differ(stored_with):
        print(f"baseline: not compared: {why}")
    elif moved := compared(stored, host_now()):
        raise SystemExit(
            f"baseline: {'; '.join(moved)}. If that is meant, store it anew: "
            "python -m ridgeline_bench.scripts.baseline --store"
        )
    else:
        print(f"baseline: {len(stored)} lines are as stored")


if __name__ == "__main__":
    main()
