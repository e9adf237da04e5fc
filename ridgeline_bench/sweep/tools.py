"""What `ridgeline kernels check` and `ridgeline kernels bench` print and keep."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.sweep.beside import Timed, bench, pairs_of
from ridgeline_bench.sweep.check import Checked, CheckOptions, cases_to_check, check
from ridgeline_bench.sweep.tuning import machine_facts, open_records

SAID = 5.0  # seconds between two lines of progress


def run_check(options: CheckOptions, device: str, records: Path | None, commit: str) -> bool:
    """Check implementations, show what is wrong and how far it is, and return True if all are right and none is left.

    Raises InvalidConfig if no op has such a name, or there is no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig("there is no GPU here; use --device cpu, where Triton's interpreter runs kernels.")
    checks, console, started = cases_to_check(options, device), Console(), time.monotonic()
    if not checks:
        raise InvalidConfig(f"no op with cases has {options.ops!r} in its name; `ridgeline kernels check` takes all.")
    open_records(records)
    ways, found, said = sum(len(one.ways) for one in checks), list[Checked](), started
    took = defaultdict[str, float](float)
    for one in check(checks, options, lambda text: console.print(text, markup=False, soft_wrap=True)):
        now = time.monotonic()
        took[one.op] += now - started - sum(took.values())
        found.append(one)
        if one.failed:
            console.print(f"WRONG {one.op} {one.case} [{one.way}]: {one.failed}", markup=False, soft_wrap=True)
        if now - said > SAID:
            said = now
            console.print(f"{len(found)} of {ways} checked in {now - started:.0f} s, at {one.op}", markup=False)
    wrong, seconds = [one for one in found if one.failed], time.monotonic() - started
    by_time = sorted(took.items(), key=lambda each: -each[1])
    largest = max((one.error for one in found), default=0.0)
    slowest = ", ".join(f"{op} {used:.0f}" for op, used in by_time[:5])
    console.print(
        f"{len(found) - len(wrong)} of {ways} right, {len(wrong)} wrong, {ways - len(found)} not run, in "
        f"{seconds:.0f} s on {device}; the largest error is {largest:.3f} of what is allowed. "
        f"Seconds with compiling: {slowest}.",
        soft_wrap=True,
    )
    if options.every > 1:
        console.print(f"All cases would take about {options.every * seconds:.0f} s at this rate.")
    if records:
        line = {
            "engine": "ridgeline", "workload": "kernels check", "model": options.ops or "all ops", "metric": "right",
            "value": len(found) - len(wrong), "of": ways, "unit": "runs", "better": "higher", "wrong": len(wrong),
            "every": options.every, "seconds": round(seconds, 1), "device": device, "cuts": options.cuts,
            "seconds_of": {op: round(used, 2) for op, used in took.items()},
            "failures": [f"{one.op} {one.case} [{one.way}]: {one.failed}" for one in wrong][:50],
            **machine_facts(commit), "command": "ridgeline kernels check",
        }  # fmt: skip
        _append(records, line)
    return not wrong and len(found) == ways


def run_bench(op: str, case: str, seconds: float, records: Path | None, commit: str) -> bool:
    """Time an op's classes of shapes on this GPU, and return True if all of ours were right.

    Raises InvalidConfig if there is no such op or case, or no GPU.
    """
    pairs = pairs_of(op, case)
    if not torch.cuda.is_available():
        raise InvalidConfig("there is no GPU here; `ridgeline bench kernels --device cpu` times ops on a CPU.")
    open_records(records)
    console, base, times = Console(), machine_facts(commit), list[Timed]()
    table = Table("case", "µs", "limit", "share", "TB/s", "TFLOP/s", "beside", "µs", "ours faster", title=op)
    for one in bench(pairs, time.monotonic() + (seconds or float("inf"))):
        times.append(one)
        table.add_row(*_row(one))
        for name, why in one.failed.items():
            console.print(f"FAILED {one.pair} [{name or 'ours'}]: {why}", markup=False, soft_wrap=True)
        if records:
            _append(records, _line(one, base))
    console.print(table)
    console.print(f"{len(times)} of {len(pairs)} timed")
    return len(times) == len(pairs) and all(one.own_us is not None for one in times)


def _row(one: Timed) -> list[str]:
    label = f"{one.pair.case.label} {one.pair.case.form}".rstrip()
    if one.own_us is None:
        return [label, "-"]
    own, peer = one.own_us, one.fastest_peer
    rates = f"{one.nbytes / own / 1e6:.2f}", f"{one.flops / own / 1e6:.0f}"
    beside = [peer[0], f"{peer[1]:.2f}", f"{peer[1] / own:.2f}"] if peer else ["-", "-", "-"]
    return [label, f"{own:.2f}", f"{one.limit_us:.2f}", f"{100 * one.limit_us / own:.0f} %", *rates, *beside]


def _line(one: Timed, base: dict[str, Any]) -> dict[str, Any]:
    return {
        "engine": "ridgeline", "workload": f"kernels bench:{one.pair.op}", "model": one.pair.case.label,
        "metric": one.pair.op, "format": one.pair.case.form,
        **({} if one.own_us is None else {"value": round(one.own_us, 3)}), "limit": round(one.limit_us, 3),
        "unit": "us", "better": "lower", "bytes": one.nbytes, "flops": one.flops,
        "beside": {name: round(us, 3) for name, us in one.us.items() if name}, "failed": one.failed, **base,
        "command": f"ridgeline kernels bench {one.pair.op}",
    }  # fmt: skip


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")
