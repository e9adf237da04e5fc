"""Nsight Compute on the kernels that a child process runs between marks, as figures by the names of its sections.

python -m ridgeline_bench.profile.ncu MODEL BATCH CONTEXT '{"device": "cuda"}'     # a child: one step between marks
"""

from __future__ import annotations

import csv
import gc
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ridgeline.core.errors import InvalidConfig

SECTIONS = (
    "SpeedOfLight", "MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables", "ComputeWorkloadAnalysis",
    "WarpStateStats", "SchedulerStats", "SourceCounters", "LaunchStats", "Occupancy",
)  # fmt: skip
TIMEOUT = 400  # seconds for all kernels; each is run again some 40 times
LAUNCH = "launch__"
GLOBAL, SHARED = "pipe_lsu_mem_global_op", "pipe_lsu_mem_shared_op"
FIGURES: Mapping[str, str] = {  # our name → the raw page's, in base units: ns, bytes, per cent, warps, cycles
    "ns": "gpu__time_duration.sum",
    "cycles": "gpc__cycles_elapsed.max",
    # speed of light: the share of the peak of each part that is the busiest unit's in it
    "compute %": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "memory %": "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "DRAM %": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "L2 %": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "L1 %": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "tensor %": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    # memory workload
    "bytes a second": "dram__bytes.sum.per_second",
    "L1 hits %": "l1tex__t_sector_hit_rate.pct",
    "L2 hits %": "lts__t_sector_hit_rate.pct",
    "load requests": f"l1tex__t_requests_{GLOBAL}_ld.sum",
    "load sectors": f"l1tex__t_sectors_{GLOBAL}_ld.sum",
    "store requests": f"l1tex__t_requests_{GLOBAL}_st.sum",
    "store sectors": f"l1tex__t_sectors_{GLOBAL}_st.sum",
    "shared wavefronts": "memory_l1_wavefronts_shared",
    "shared wavefronts, ideal": "memory_l1_wavefronts_shared_ideal",
    "global sectors": "memory_l2_theoretical_sectors_global",
    "global sectors, ideal": "memory_l2_theoretical_sectors_global_ideal",
    "bank conflicts of loads": f"l1tex__data_bank_conflicts_{SHARED}_ld.sum",
    "bank conflicts of stores": f"l1tex__data_bank_conflicts_{SHARED}_st.sum",
    # schedulers: each of four in a multiprocessor may start an instruction a cycle
    "active warps": "smsp__warps_active.avg.per_cycle_active",
    "eligible warps": "smsp__warps_eligible.avg.per_cycle_active",
    "issued a cycle": "smsp__issue_active.avg.per_cycle_active",
    "IPC": "sm__inst_executed.avg.per_cycle_active",
    "cycles between issues": "smsp__average_warp_latency_per_inst_issued.ratio",
    # occupancy and launch
    "occupancy %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "occupancy, at most %": "sm__maximum_warps_per_active_cycle_pct",
    "registers": f"{LAUNCH}registers_per_thread",
    "shared bytes": f"{LAUNCH}shared_mem_per_block",
    "threads": f"{LAUNCH}block_size",
    "blocks": f"{LAUNCH}grid_size",
    "waves": f"{LAUNCH}waves_per_multiprocessor",
}
STALL = "smsp__average_warps_issue_stalled_"  # one metric per reason for which a warp waits
STALL_END = "_per_issue_active.ratio"
BASE = {  # units of a page that was not asked for base units
    "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6, "second": 1e9, "s": 1e9, "Kbyte/s": 1e3, "Mbyte/s": 1e6,
    "Gbyte/s": 1e9, "Tbyte/s": 1e12, "Kbyte/block": 1e3, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9,
}  # fmt: skip
SAMPLES, SOURCE = "# Samples", "Source"
AT, INSTRUCTION = "at", 16  # bytes of an instruction
HOTTEST = 12  # instructions that are kept of a kernel


@dataclass(frozen=True)
class HotLine:
    """An instruction: its text, bytes from the kernel's first one, its share of the samples that found a warp there,
    and why warps stood there, as shares of these samples."""

    text: str
    at: int
    share: float
    stalls: Mapping[str, float]


@dataclass(frozen=True)
class NcuKernel:
    """A launch as Nsight Compute saw it.

    figures: by the names of FIGURES, those that were measured. stalls: warps that wait when an instruction is issued,
    by reason, of which "selected" is the one that is issued. lines: the hottest instructions.
    """

    name: str
    figures: Mapping[str, float]
    stalls: Mapping[str, float]
    lines: Sequence[HotLine] = ()

    @property
    def stall(self) -> str:
        """The reason for which most warps wait, or "" if none was measured."""
        waits = {reason: warps for reason, warps in self.stalls.items() if reason != "selected"}
        return max(waits, key=waits.__getitem__) if waits else ""

    def line(self) -> dict[str, Any]:
        """Return the kernel for a file of results, with four digits of each figure."""
        lines = [asdict(each) for each in self.lines]
        rounded: dict[str, Any] = json.loads(
            json.dumps({"figures": self.figures, "stalls": self.stalls, "lines": lines}),
            parse_float=lambda text: float(f"{float(text):.4g}"),
        )
        return {"kernel": self.name, **rounded}


def measured(child: Sequence[str], kernels: int = 0, seconds: float = TIMEOUT) -> list[NcuKernel]:
    """Return the report of Nsight Compute on the kernels that a command runs between its profiler's marks.

    kernels: the most to look at, 0 for all. Clocks are left alone; caches are emptied before each run of a kernel.
    Raise InvalidConfig where ncu is missing, refuses, finds nothing or takes longer.
    """
    tool = shutil.which("ncu")
    if tool is None:
        raise InvalidConfig("Nsight Compute (ncu) is not installed or not on PATH; install it, or leave out --ncu.")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.ncu-rep"
        command = [tool, "-f", "-o", str(report), "--clock-control", "none", "--profile-from-start", "off"]
        command += ["--kernel-name-base", "function", *(["--launch-count", str(kernels)] if kernels else [])]
        command += [word for section in SECTIONS for word in ("--section", section)]
        said, ended = run_tool([*command, *child], seconds)
        if not ended:
            raise InvalidConfig(
                f"Nsight Compute did not finish within {seconds:.0f} s; ask for fewer kernels (--ncu-kernels)."
            )
        pages = [_page(tool, report, *page) for page in (("raw",), ("source", "--print-source", "sass"))]
    found = list(parse(pages[0]))
    if not found:
        told = (said + pages[0]).splitlines()
        wrong = [line for line in told if "ERROR" in line or "Error" in line] or told[-1:] or ["it said nothing"]
        raise InvalidConfig(f"Nsight Compute gave no measurements: {wrong[0].strip()[:300]}")
    lines = list(hot_lines(pages[1]))
    if len(lines) != len(found):  # kernels without samples have no page
        return found
    return [replace(kernel, lines=hottest) for kernel, hottest in zip(found, lines, strict=True)]


def run_tool(command: Sequence[str], seconds: float, **environment: str) -> tuple[str, bool]:
    """Run a tool that starts a program of its own, and return all that both printed, and whether they ended in time. If
    they did not, both are ended."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True, env={**os.environ, **environment},
    )  # fmt: skip
    try:
        return process.communicate(timeout=seconds)[0], True
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0], False


def _page(tool: str, report: Path, *page: str) -> str:
    command = [tool, "-i", str(report), "--csv", "--print-units", "base", "--page", *page]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False).stdout


def parse(text: str) -> Iterator[NcuKernel]:
    """Yield the kernels of a raw page in CSV, without their lines."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if len(lines) < 3:
        return
    header, units, *rows = csv.reader(io.StringIO("\n".join(lines)))
    unit = dict(zip(header, units, strict=False))
    for row in rows:
        values = {key: text for key, text in zip(header, row, strict=False) if text}
        figures = {
            name: _number(values[metric]) * BASE.get(unit[metric], 1.0)
            for name, metric in FIGURES.items()
            if metric in values
        }
        stalls = {
            key.removeprefix(STALL).removesuffix(STALL_END): _number(value)
            for key, value in values.items()
            if key.startswith(STALL) and key.endswith(STALL_END)
        }
        yield NcuKernel(values.get("Kernel Name", ""), figures, stalls)


def hot_lines(text: str, most: int = HOTTEST) -> Iterator[tuple[HotLine, ...]]:
    """Yield the hottest instructions of each kernel of a source page in CSV, the hottest first."""
    kernels: list[list[dict[str, str]]] = []
    header: list[str] = []
    for row in csv.reader(line for line in text.splitlines() if line.startswith('"')):
        if row[0] == "Kernel Name":
            kernels.append([])
            header = []
        elif SOURCE in row and SAMPLES in row:
            header = row
        elif header and kernels:
            at = {AT: str(INSTRUCTION * len(kernels[-1]))}
            kernels[-1].append(dict(zip(header, row, strict=False)) | at)
    for rows in kernels:
        total = sum(_number(row[SAMPLES]) for row in rows)
        rows.sort(key=lambda row: -_number(row[SAMPLES]))
        yield tuple(_hot(row, total) for row in rows[:most] if total and _number(row[SAMPLES]))


def _hot(row: Mapping[str, str], total: float) -> HotLine:
    here = _number(row[SAMPLES])
    stalls = {
        key.removeprefix("stall_"): _number(value) / here
        for key, value in row.items()
        if key.startswith("stall_") and "(" not in key and 20 * _number(value) >= here
    }
    text = " ".join(row[SOURCE].split())
    return HotLine(text, int(row[AT]), here / total, dict(sorted(stalls.items(), key=lambda each: -each[1])))


def run_ncu(
    model: str, options: Mapping[str, Any], *, batch: int, context: int, kernels: int
) -> tuple[str, list[NcuKernel]]:
    """Return a table of the first `kernels` kernels of a decode step and these, or one sentence that says why there are
    none."""
    gc.collect()
    torch.cuda.empty_cache()  # the child needs the memory
    child = [sys.executable, "-m", "ridgeline_bench.profile.ncu", model, str(batch), str(context), json.dumps(options)]
    try:
        found = measured(child, kernels)
    except InvalidConfig as error:
        return f"{error}\n", []
    return table(found), found


def table(kernels: Sequence[NcuKernel]) -> str:
    """Return the kernels, those of one name together, longest first. Rates and shares are means."""
    groups: dict[str, list[NcuKernel]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.name].append(kernel)

    def mean(name: str, figure: str) -> float:
        return sum(each.figures.get(figure, 0.0) for each in groups[name]) / len(groups[name])

    lines = [
        f"{'Nsight Compute':<40} {'µs':>9} {'calls':>5} {'GB/s':>6} {'compute':>8} {'memory':>8} {'DRAM':>6} {'L2':>6} "
        f"{'L1':>6} occupancy  warps wait for"
    ]
    for name in sorted(groups, key=lambda name: -mean(name, "ns") * len(groups[name])):
        shares = [f"{mean(name, f'{part} %'):.0f} %" for part in ("compute", "memory", "DRAM", "L2", "L1", "occupancy")]
        lines.append(
            f"  {name[:38]:<38} {mean(name, 'ns') * len(groups[name]) / 1e3:9.1f} {len(groups[name]):5} "
            f"{mean(name, 'bytes a second') / 1e9:6.0f} {shares[0]:>8} {shares[1]:>8} {shares[2]:>6} {shares[3]:>6} "
            f"{shares[4]:>6} {shares[5]:>9}  {groups[name][0].stall}"
        )
    return "\n".join(lines) + "\n"


def described(kernel: NcuKernel) -> str:
    """Return a kernel's figures section by section, in words."""
    have = kernel.figures

    def share(name: str) -> str:
        return f"{have[name]:.0f} %" if name in have else "unknown"

    def each(of: str, one: str) -> str:
        return f"{have[of] / have[one]:.1f}" if have.get(one) and of in have else "no"

    def needless(of: str) -> str:
        return f"{have[of] / have[f'{of}, ideal']:.2f} times what is needed" if have.get(f"{of}, ideal") else "none"

    waits = sorted(kernel.stalls.items(), key=lambda item: -item[1])[:5]
    parts = {
        "speed of light": f"compute {share('compute %')}, memory {share('memory %')}: DRAM {share('DRAM %')}, "
        f"L2 {share('L2 %')}, L1 {share('L1 %')}",
        "memory": f"{have.get('bytes a second', 0) / 1e9:,.0f} GB/s; hits: L1 {share('L1 hits %')}, "
        f"L2 {share('L2 hits %')}; {each('load sectors', 'load requests')} sectors a load, "
        f"{each('store sectors', 'store requests')} a store",
        "shared memory": f"wavefronts: {needless('shared wavefronts')}; sectors of global: "
        f"{needless('global sectors')}",
        "schedulers": f"{have.get('active warps', 0):.1f} warps, of which {have.get('eligible warps', 0):.2f} could "
        f"issue; {have.get('issued a cycle', 0):.2f} issued a cycle, IPC {have.get('IPC', 0):.2f}",
        "warps wait": ", ".join(f"{reason} {cycles:.1f}" for reason, cycles in waits)
        + f" of {have.get('cycles between issues', 0):.1f} cycles between two issues",
        "launch": f"{have.get('blocks', 0):,.0f} blocks of {have.get('threads', 0):.0f} threads, "
        f"{have.get('registers', 0):.0f} registers, {have.get('shared bytes', 0):,.0f} bytes of shared memory; "
        f"occupancy {share('occupancy %')} of {share('occupancy, at most %')}, {have.get('waves', 0):.1f} waves",
    }
    lines = [
        f"{kernel.name}, {have.get('ns', 0) / 1e3:,.1f} µs",
        *(f"  {name:<15} {text}" for name, text in parts.items()),
    ]
    for line in kernel.lines[:5]:
        why = ", ".join(f"{reason} {100 * part:.0f} %" for reason, part in list(line.stalls.items())[:2])
        lines.append(f"  {100 * line.share:13.1f} %  {line.text[:60]:<60}  {why}")
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
