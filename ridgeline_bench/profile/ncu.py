"""Nsight Compute on the kernels of one decode step, run on a child process.

python -m ridgeline_bench.profile.ncu MODEL BATCH CONTEXT '{"device": "cuda"}'     # the child: one step between marks
"""

from __future__ import annotations

import csv
import gc
import io
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__bytes.sum.per_second": "bandwidth",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "of peak",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy",
}
STALL = "smsp__average_warps_issue_stalled_"  # one metric per reason for which a warp waits
STALL_END = "_per_issue_active.ratio"
NANOSECONDS = {"nsecond": 1.0, "ns": 1.0, "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6, "second": 1e9, "s": 1e9}
RATES = {"byte/s": 1.0, "Kbyte/s": 1e3, "Mbyte/s": 1e6, "Gbyte/s": 1e9, "Tbyte/s": 1e12}


def run_ncu(model: str, options: Mapping[str, Any], *, batch: int, context: int, kernels: int) -> str:
    """Return a table of the first `kernels` kernels of a decode step, or one sentence that says why there is none."""
    tool = shutil.which("ncu")
    if tool is None:
        return "Nsight Compute (ncu) is not installed or not on PATH; install it for bandwidth, occupancy and stalls.\n"
    gc.collect()
    torch.cuda.empty_cache()  # the child needs the memory
    child = [sys.executable, "-m", "ridgeline_bench.profile.ncu", model, str(batch), str(context), json.dumps(options)]
    command = [tool, "--csv", "--page", "raw", "--clock-control", "none", "--profile-from-start", "off"]
    command += ["--launch-count", str(kernels), "--section", "WarpStateStats", "--metrics", ",".join(METRICS), *child]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return "Nsight Compute did not finish within 300 s; ask for fewer kernels with --ncu-kernels.\n"
    rows = parse(done.stdout)
    if not rows:
        said = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line] or ["no kernels"]
        return f"Nsight Compute gave no measurements: {said[0].strip()}\n"
    return table(rows)


def parse(text: str) -> list[dict[str, Any]]:
    """Return the raw page of `ncu --csv`: for each kernel its name, time (s), bandwidth (B/s), shares (%) and top
    stall."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if len(lines) < 3:
        return []
    header, units, *kernels = csv.reader(io.StringIO("\n".join(lines)))
    unit = dict(zip(header, units, strict=False))
    return [_kernel(dict(zip(header, values, strict=False)), unit) for values in kernels]


def _kernel(values: Mapping[str, str], unit: Mapping[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": values.get("Kernel Name", "")}
    for metric, name in METRICS.items():
        if metric in values:
            row[name] = _number(values[metric]) * RATES.get(unit[metric], 1.0)
            row[name] *= NANOSECONDS.get(unit[metric], 1.0) / 1e9 if name == "time" else 1
    stalls = {key: _number(text) for key, text in values.items() if key.startswith(STALL) and key.endswith(STALL_END)}
    if stalls:
        row["stall"] = max(stalls, key=lambda key: stalls[key]).removeprefix(STALL).removesuffix(STALL_END)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Return the kernels, those of one name together, longest first. Rates and shares are means."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["name"]].append(row)

    def mean(name: str, field: str) -> float:
        return sum(row.get(field, 0.0) for row in groups[name]) / len(groups[name])

    lines = [f"{'Nsight Compute, one decode step':<52} {'ms':>10} {'calls':>7} {'GB/s':>7} {'of peak':>9} occupancy"]
    for name in sorted(groups, key=lambda name: -mean(name, "time") * len(groups[name])):
        lines.append(
            f"  {name[:50]:<50} {1e3 * mean(name, 'time') * len(groups[name]):10.3f} {len(groups[name]):7} "
            f"{mean(name, 'bandwidth') / 1e9:7.0f} {mean(name, 'of peak'):7.0f} % {mean(name, 'occupancy'):7.0f} %"
            f"  {groups[name][0].get('stall', '')}"
        )
    return "\n".join(lines) + "\n"


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return 0.0


def _child(model: str, batch: str, context: str, options: str) -> None:
    """Warm up, then run one decode step between the marks that Nsight Compute looks for."""
    from ridgeline.assembly import assemble
    from ridgeline.core.plan.request import Request, SamplingParams
    from ridgeline.core.settings.config import LLMConfig
    from ridgeline.perf.footprint import kv_bytes_per_token
    from ridgeline.weights.folder import EMBEDDED_MODEL
    from ridgeline.weights.loader import read_model_config, resolve_model

    length = int(context)
    config = LLMConfig(model=model, **json.loads(options), enforce_eager=True)
    spec = read_model_config(resolve_model(config.model or EMBEDDED_MODEL, None)).spec
    # Nsight Compute saves and restores all memory that a kernel could write, for every pass: a full-size cache takes
    # minutes.
    cache = 2 * int(batch) * (length + 64) * kv_bytes_per_token(spec, "float32")
    assembly = assemble(replace(config, kv_cache_memory=int(cache), max_model_len=length + 64))
    engine = assembly.engine
    for row in range(int(batch)):
        ids = tuple(1 + (row + i) % (assembly.model.spec.vocab_size - 1) for i in range(length))
        engine.add(
            Request(
                id=str(row),
                prompt_token_ids=ids,
                params=SamplingParams(temperature=0),
                seed=0,
                max_total_tokens=length + 64,
            )
        )
    for _ in range(16 + length * int(batch) // engine.config.max_num_batched_tokens):
        engine.step()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    engine.step()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    engine.shutdown()


if __name__ == "__main__":
    _child(*sys.argv[1:])
