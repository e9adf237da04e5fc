"""The tools of compute-sanitizer over the ladders' top rungs and hot kernels, on one NVIDIA GPU.

    python -m ridgeline_bench.scripts.sanitized [--tools memcheck racecheck synccheck initcheck] [--kernels NAME ...]
        [--cubins FOLDER] [--seconds 240] [--raw FOLDER] [--commit ""] [--output FILE.jsonl]

memcheck    reads and writes outside of what was allocated, or at an address that does not fit the type
racecheck   threads of a block that access one word of shared memory without a barrier in between
synccheck   barriers that not all threads reach, and masks that lack the caller
initcheck   reads of memory that nobody wrote

Kernels have the names of `ridgeline_bench.named_kernels`, and small problems, because the tools slow a kernel down up
to a hundred times. First all run without a tool, beside their references. Then each tool looks at all of them in a
process of its own, at the same time, and at four kernels with one fault each (`ridgeline/kernels/cuda/faults.cu`): a
tool that does not find its fault proves nothing. torch's cache of memory is off meanwhile, so that each tensor is an
allocation whose end memcheck knows.

--raw keeps all that each tool said. A line has the number of reports by kernel and kind, those of our kernels, of the
faulty one, and of torch's own apart. The command ends with code 1 if one of our kernels has a report, and 2 if a tool
missed its fault or did not run.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ridgeline_bench.named_kernels import loaded, title
from ridgeline_bench.profile.ncu import run_tool
from ridgeline_bench.results import host_with
from ridgeline_bench.scripts.asked import OneOf, asked, keep, told

FAULTS = Path(__file__).parents[2] / "ridgeline" / "kernels" / "cuda" / "faults.cu"
FAULTY = {
    "memcheck": "faulty_memory", "racecheck": "faulty_race", "synccheck": "faulty_barrier", "initcheck": "faulty_start",
}  # fmt: skip
KERNELS = (
    "memory_bound:vector_add-vectors", "memory_bound:transpose-vectors", "memory_bound:reduction-grid",
    "memory_bound:silu_multiply-vectors", "memory_bound:softmax-shuffles", "memory_bound:layer_norm-cp_async",
    "memory_bound:rms_norm-groups", "gemm:mma_sync", "gemm:async_stores", "gemm:shared_sums",
    "attention:beside:heads of 128", "attention:fp8-beside:heads of 128", "attention:gradients-roles:heads of 128",
    "op:rms_norm:64x4096", "op:gated_activation:silu 64x14336", "op:rope_kv:64x(32+8)", "op:linear:8x6144x4096",
    "op:fp8_linear:8x6144x4096 token", "op:paged_attention:1x 2048/2048", "op:decode_attention:8x 1024 heads 32/8",
    "op:sample:1x128256",
)  # fmt: skip
TORCHS = ("at::", "cub::", "cutlass", "nvjet", "cublas", "c10::", "cudnn", "thrust::", "gemv", "splitK", "std::enable")
OPTIONS: Mapping[str, Sequence[str]] = {"memcheck": ("--report-api-errors", "no")}
PLACE = re.compile(r"\bat (?:0x[0-9a-f]+ in )?(.+?)(?:\+0x[0-9a-f]+|$)")
DETAIL = re.compile(r"0x[0-9a-f]+|\b\d+\b")


@dataclass(frozen=True)
class FaultyCode:
    """The faulty kernels as they are compiled: `ridgeline.kernels.cuda.carried.CompiledFile`."""

    name: str = "faults"
    source: Path = FAULTS
    arch: str = "sm_80"
    defines: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """What a tool said. right: names of kernels that ran under it and were right. reports: by kernel and kind. error:
    why there is no verdict, or "". text: all that it said."""

    tool: str
    right: list[str] = field(default_factory=list)
    reports: Counter[tuple[str, str]] = field(default_factory=Counter)
    error: str = ""
    text: str = ""

    def of(self, who: str) -> int:
        """Return the reports of "ours", "torch's" or "faulty" kernels."""
        return sum(count for (kernel, _), count in self.reports.items() if owner(kernel) == who)


def owner(kernel: str) -> str:
    """Return whose a kernel is."""
    if kernel.startswith("faulty_"):
        return "faulty"
    return "torch's" if any(part in kernel for part in TORCHS) else "ours"


def reports(text: str) -> Iterator[tuple[str, str]]:
    """Yield the kernel and the kind of each report of compute-sanitizer."""
    kind = ""
    for line in text.splitlines():
        found = re.match(r"=========( +)(\S.*)", line)
        if not found:
            continue
        if len(found[1]) == 1:
            kind = "" if "SUMMARY" in found[2] else found[2]
        if kind and (place := PLACE.search(found[2])):
            yield place[1].partition("(")[0].strip(), DETAIL.sub("n", kind.partition(" at ")[0])
            kind = ""


def looked(tool: str, program: str, child: Sequence[str], seconds: float) -> Outcome:
    """Run a child under a tool."""
    command = [
        program,
        "--tool",
        tool,
        "--print-limit",
        "1000",
        *OPTIONS.get(tool, ()),
        *child,
        "--faulty",
        FAULTY[tool],
    ]
    text, ended = run_tool(command, seconds, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    found = Outcome(tool, right_ones(text), Counter(reports(text)), text=text)
    if not ended:
        found.error = f"it did not end within {seconds:.0f} s"
        return found
    if "SUMMARY" not in text:
        found.error = (text.strip().splitlines() or ["it said nothing"])[-1][:200]
    elif wrong := [line for line in text.splitlines() if line.startswith("ran ") and not line.endswith(": right")]:
        found.error = wrong[0][:200]
    elif not found.of("faulty"):
        found.error = f"it did not find the fault of {FAULTY[tool]}"
    return found


def right_ones(text: str) -> list[str]:
    """Return the kernels of which a child said that they ran and were right."""
    return re.findall(r"^ran (.*): right$", text, re.MULTILINE)


def run(names: Sequence[str], cubins: Path | None, faulty: str) -> None:
    """Run kernels in this process, and the faulty one behind them."""
    from ridgeline.kernels.cuda.carried import code_of
    from ridgeline.kernels.cuda.driver import CudaDriver, DriverError, Kernel

    for name in names:
        with torch.no_grad():
            found = loaded(name, cubins, small=True)
        torch.cuda.synchronize()
        print(f"ran {name}: {found.fault or 'right'}", flush=True)
        del found
    if faulty:
        code = FaultyCode()
        x, y = (torch.empty(64, device="cuda", dtype=torch.int32) for _ in range(2))
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
        kernel = Kernel(CudaDriver(), code_of(code, arch, cubins, __spec__.name), faulty, device=0)
        pointers = [ctypes.c_void_p(each.data_ptr()) for each in (x, y)]
        try:
            kernel.launch((1, 1, 1), (64, 1, 1), torch.cuda.current_stream().cuda_stream, pointers)
            torch.cuda.synchronize()
        except (DriverError, RuntimeError) as error:  # a context does not survive a write outside of memory
            print(f"{faulty} ended with: {str(error).splitlines()[0]}", flush=True)


def line(found: Outcome, version: str) -> dict[str, object]:
    """Return what a tool said, for a file of results."""
    said = [
        {"kernel": kernel, "kind": kind, "reports": count, "of": owner(kernel)}
        for (kernel, kind), count in found.reports.most_common(40)
    ]
    return {
        "kind": "compute-sanitizer", "tool": found.tool, "version": version, "kernels": found.right,
        "ours": found.of("ours"), "torch's": found.of("torch's"), "faulty": found.of("faulty"), "reports": said,
        "error": found.error,
    }  # fmt: skip


def main() -> None:
    given = asked(
        __doc__, tools=[OneOf(FAULTY)], kernels=(list(KERNELS), "as `ridgeline_bench.named_kernels` names them"),
        cubins=Path, seconds=240.0, raw=Path,
        commit=("", "of the checkout, where git cannot say it"), output=Path, child=(False, "run the kernels here"),
        faulty=("", "with --child: the faulty kernel that runs last"),
    )  # fmt: skip
    if given.child:
        run(given.kernels, given.cubins, given.faulty)
        return
    with told():
        for name in given.kernels:
            title(name)
    program = shutil.which("compute-sanitizer")
    if program is None:
        print(
            "compute-sanitizer is not on the PATH; CUDA's toolkit has it, and pip's nvidia-cuda-sanitizer-api.",
            file=sys.stderr,
        )
        raise SystemExit(2)
    child = [sys.executable, "-W", "ignore", "-m", __spec__.name, "--child", "--kernels", *given.kernels]
    child += ["--cubins", str(given.cubins)] if given.cubins else []
    said, ended = run_tool(child, given.seconds)
    if wrong := sorted(set(given.kernels) - set(right_ones(said))):
        last = (said.strip().splitlines() or ["it said nothing"])[-1]
        late = "" if ended else f" within {given.seconds:.0f} s"
        raise SystemExit(f"without a tool {', '.join(wrong)} did not run right{late}: {last}")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    number = (re.findall(r"[Vv]ersion ([\d.]+)", version) or [""])[0]
    with ThreadPoolExecutor(len(FAULTY)) as pool:
        outcomes = list(pool.map(lambda tool: looked(tool, program, child, given.seconds), given.tools))
    table = Table("tool", "kernels right", "reports of ours", "of torch's", "of the faulty one", "remark")
    machine = {"machine": asdict(host_with(torch.device("cuda"), given.commit))}
    for each in outcomes:
        keep(given.output, {**line(each, number), **machine})
        if given.raw:
            given.raw.mkdir(parents=True, exist_ok=True)
            (given.raw / f"{each.tool}.txt").write_text(each.text)
        table.add_row(
            each.tool, f"{len(each.right)} of {len(given.kernels)}",
            *(str(each.of(who)) for who in ("ours", "torch's", "faulty")), each.error,
        )  # fmt: skip
        for (kernel, kind), count in each.reports.items():
            if owner(kernel) == "ours":
                print(f"{each.tool}: {count} x {kind} in {kernel}")
    Console().print(table)
    if any(each.error for each in outcomes):
        raise SystemExit(2)
    if any(each.of("ours") for each in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
