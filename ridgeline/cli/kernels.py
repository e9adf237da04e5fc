"""`ridgeline kernels`: what kernels compile to, how many of them share a multiprocessor, and where fragments lie."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ridgeline.cli.options import with_records
from ridgeline.core.errors import InvalidConfig

if TYPE_CHECKING:
    from ridgeline.kernels.base.aot import AotKernel
    from ridgeline.kernels.base.inspection import Inspection
    from ridgeline.kernels.base.occupancy import Occupancy
    from ridgeline_bench.sweep.tune import TuneOptions

MOST = 12  # instructions that are counted in a table

app = typer.Typer(
    help="Check, time and tune kernels on a GPU; look at machine code, occupancy and fragments without one.",
    no_args_is_help=True,
)
Processes = Annotated[int, typer.Option(min=0, help="That compile; 0: one a core, at most 32.")]
Lines = Annotated[Path | None, typer.Option("--json", help="Result lines are appended to this file.")]
Commit = Annotated[str, typer.Option(help="Recorded with the results; default: what git says.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]


@dataclass(frozen=True)
class BlockFlags:
    """The needs of a block."""

    threads: Annotated[int, typer.Option(min=1, help="Threads of a block (of a workgroup).")] = 256
    registers: Annotated[int, typer.Option(min=1, help="Registers of a thread.")] = 64
    shared: Annotated[int, typer.Option(min=0, help="Bytes of shared memory (LDS) of a block.")] = 0
    barriers: Annotated[int, typer.Option(min=0, help="Barriers that a block uses, on NVIDIA's GPUs.")] = 1


@dataclass(frozen=True)
class TuneFlags:
    """The effort of tuning."""

    case: Annotated[str, typer.Option(help="A part of the labels of cases.")] = ""
    pairs: Annotated[int, typer.Option(min=0, help="Only so many pairs, drawn by the seed; 0: all.")] = 0
    measured: Annotated[int, typer.Option(min=1, help="Cuts of a pair that are measured, the best by the model.")] = 8
    drawn: Annotated[int, typer.Option(min=0, help="Cuts that are measured besides, drawn by the seed.")] = 0
    seed: Annotated[int, typer.Option(help="Of what is drawn, and of the order of timings.")] = 0
    pair_seconds: Annotated[float, typer.Option(min=0.1, help="Of one pair, without compiling.")] = 15.0
    seconds: Annotated[float, typer.Option(min=0, help="Of all, compiling included; 0: no limit.")] = 0.0
    processes: Processes = 0
    compile_only: Annotated[bool, typer.Option("--compile-only", help="Compile the cuts; no GPU is needed.")] = False

    def options(self) -> TuneOptions:
        from ridgeline.perf.search import SearchSettings
        from ridgeline_bench.sweep.tune import SETTINGS, TuneOptions

        settings = SearchSettings(
            measured=self.measured, drawn=self.drawn, seed=self.seed, seconds=self.pair_seconds,
            repeats=SETTINGS.repeats,
        )  # fmt: skip
        return TuneOptions(settings=settings, seconds=self.seconds, processes=_number(self.processes), pairs=self.pairs)


@app.command("list")
def list_kernels(
    name: Annotated[str, typer.Argument(help="A part of the kernels' names.")] = "",
) -> None:
    """List the compilations that `inspect` knows: Triton's kernels with their types and constants."""
    for kernel in _kernels(name):
        print(kernel.name)


@app.command()
@with_records
def occupancy(
    arch: Annotated[str, typer.Option("--arch", help="sm_80 to sm_120, gfx942 or gfx1100.")] = "sm_90",
    *,
    block: BlockFlags,
    as_json: AsJson = False,
) -> None:
    """Compute how many blocks share a multiprocessor, and what keeps more of them away."""
    from ridgeline.kernels.base.occupancy import COMPUTE_UNITS, waves
    from ridgeline.kernels.base.occupancy import occupancy as of_nvidia

    try:
        if arch in COMPUTE_UNITS:
            found = waves(arch, block.threads, block.registers, block.shared)
        else:
            found = of_nvidia(arch, block.threads, block.registers, block.shared, block.barriers)
    except ValueError as error:
        raise InvalidConfig(str(error)) from error
    if as_json:
        print(json.dumps(_figures(found)))
        return
    table = Table(
        "resource", "blocks that it allows", title=f"{arch}: {found.blocks} blocks, {100 * found.share:.0f} %"
    )
    for resource, blocks in found.blocks_by.items():
        table.add_row(resource, str(blocks), style="bold" if resource in found.limits else "")
    Console().print(table)


@app.command()
def layout(
    instruction: Annotated[
        str, typer.Argument(help="A part of an instruction's name; without one they are listed.")
    ] = "",
) -> None:
    """Print which lane has which numbers of a matrix instruction's operands, as lane.place."""
    if find_spec("ridgeline.kernels.micro") is None:
        raise InvalidConfig("layouts are not in the wheel; clone the repository and install it with pip install -e .")
    layouts = import_module("ridgeline.kernels.micro.mma_mfma.layouts")
    found = layouts.find(instruction)
    if not found:
        names = ", ".join(each.name for each in layouts.INSTRUCTIONS)
        raise InvalidConfig(f"no instruction's name contains {instruction!r}; there are {names}.")
    for each in found:
        print(layouts.described(each) + "\n" if instruction else each.name)


@app.command()
def inspect(
    name: Annotated[str, typer.Argument(help="A part of a kernel's name, as `ridgeline kernels list` has it.")],
    arch: Annotated[str, typer.Option("--arch", help="Architecture that it is compiled for.")] = "sm_90",
    stage: Annotated[str, typer.Option(help="Print this form instead: ttir, ttgir, llir, ptx, sass or amdgcn.")] = "",
    passes: Annotated[
        bool, typer.Option("--passes", help="Instead: what each pass of Triton's compiler added and removed.")
    ] = False,
    diff: Annotated[
        str, typer.Option(help="Instead: the lines that this pass changed, by its number or a part of its name.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Compile a kernel, and show its forms, instructions, registers, spills, shared memory, occupancy, and its passes.

    The first kernel counts whose name contains the words and which is made for the architecture.
    """
    from ridgeline.kernels.base.inspection import inspect as look

    fitting = [kernel for kernel in _kernels(name) if arch in kernel.options.archs]
    if not fitting:
        raise InvalidConfig(f"no kernel whose name contains {name!r} is made for {arch}; see `ridgeline kernels list`.")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise InvalidConfig("TRITON_INTERPRET is set, which turns the compiler off; unset it.")
    if passes or diff:
        if stage:
            raise InvalidConfig("--stage prints a form, --passes and --diff what passes changed; choose one.")
        _show_passes(fitting[0], arch, diff, as_json=as_json)
        return
    found = look(fitting[0], arch)
    if stage and stage not in found.stages:
        raise InvalidConfig(f"{arch} has no stage {stage!r}; there are {', '.join(found.stages)}.")
    if stage:
        print(found.stages[stage])
    elif as_json:
        print(json.dumps(_report(found)))
    else:
        _show(found, len(fitting))


@app.command()
def check(
    ops: Annotated[str, typer.Argument(help="A part of ops' names; all when none is given.")] = "",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu, where Triton's kernels are interpreted.")] = "auto",
    cuts: Annotated[bool, typer.Option("--cuts", help="Every cut that a sweep tries as well, on a GPU.")] = False,
    every: Annotated[int, typer.Option(min=1, help="Only each so-many-th case, and what all would take.")] = 1,
    seconds: Annotated[float, typer.Option(min=0, help="Of all, compiling included; 0: no limit.")] = 0.0,
    processes: Processes = 0,
    json_lines: Lines = None,
    commit: Commit = "",
) -> None:
    """Check every implementation of every op against its plain reference. Exit code 1 if one is wrong or not run."""
    _need_triton()
    where = _device(device)
    if where == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    from ridgeline_bench.sweep.check import CheckOptions
    from ridgeline_bench.sweep.tools import run_check

    options = CheckOptions(ops=ops, cuts=cuts, every=every, seconds=seconds, processes=_number(processes))
    if not run_check(options, where, json_lines, commit):
        raise typer.Exit(1)


@app.command()
def bench(
    op: Annotated[str, typer.Argument(help="An op.")],
    case: Annotated[str, typer.Option(help="A part of the labels of cases.")] = "",
    seconds: Annotated[float, typer.Option(min=0, help="Of all; 0: no limit.")] = 0.0,
    json_lines: Lines = None,
    commit: Commit = "",
) -> None:
    """Time an op by classes of shapes on this GPU, beside the limit of the machine and the library."""
    _need_triton()
    from ridgeline_bench.sweep.tools import run_bench

    if not run_bench(op, case, seconds, json_lines, commit):
        raise typer.Exit(1)


@app.command()
@with_records
def tune(
    ops: Annotated[list[str] | None, typer.Argument(help="Ops; all that can be tuned when none is given.")] = None,
    *,
    effort: TuneFlags,
    out: Annotated[
        Path | None, typer.Option(help="The file of tuned cuts; your own one in the cache when none is given.")
    ] = None,
    json_lines: Lines = None,
    commit: Commit = "",
) -> None:
    """Find the fastest cut of each op and class of shapes on this GPU, and keep it for the kernels to use."""
    _need_triton()
    from ridgeline_bench.sweep.tuning import Kept, run

    effort_of = effort.options()
    if not run(tuple(ops or ()), effort.case, effort_of, Kept(out, json_lines, commit), effort.compile_only):
        raise typer.Exit(1)


def _device(name: str) -> str:
    if name not in ("auto", "cuda", "cpu"):
        raise InvalidConfig(f"unknown device {name!r}; use auto, cuda or cpu.")
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _number(processes: int) -> int:
    return processes or min(32, os.cpu_count() or 1)


def _need_triton() -> None:
    if find_spec("triton") is None:
        raise InvalidConfig("kernels need Triton, which is not installed here; pip install triton.")


def _kernels(name: str) -> list[AotKernel]:
    _need_triton()
    from ridgeline.kernels.base.aot import kernels

    found = [kernel for kernel in kernels() if name in kernel.name]
    if not found:
        raise InvalidConfig(f"no kernel's name contains {name!r}; `ridgeline kernels list` has them all.")
    return found


def _show(found: Inspection, many: int) -> None:
    console, figures = Console(), found.occupancy
    console.print(f"{found.name} for {found.arch}" + (f" (the first of {many})" if many > 1 else ""), soft_wrap=True)
    console.print(
        f"{found.registers} registers, {found.spilled} spilled, {found.shared:,} bytes of shared memory, "
        f"{found.threads} threads: {figures.blocks} blocks of a multiprocessor, {100 * figures.share:.0f} % of its "
        f"warps; more would need more {' and '.join(figures.limits)}."
    )
    table = Table("stage", "lines", f"the {MOST} most frequent instructions")
    for stage, text in found.stages.items():
        counts = list(found.counts(stage).items())[:MOST]
        table.add_row(stage, f"{text.count(chr(10)):,}", ", ".join(f"{count} {name}" for name, count in counts))
    console.print(table)


def _show_passes(kernel: AotKernel, arch: str, diff: str, *, as_json: bool) -> None:
    from ridgeline.kernels.base.passes import changes

    found = changes(kernel, arch)
    if diff:
        chosen = [each for each in found if (str(each.number) == diff if diff.isdigit() else diff in each.name)]
        if not chosen:
            names = ", ".join(f"{each.number} {each.name}" for each in found)
            raise InvalidConfig(f"no pass {diff!r} changed {kernel.name}; there are {names}.")
        for each in chosen:
            print(f"{each.number} {each.name}", *each.diff(), sep="\n")
    elif as_json:
        for each in found:
            lines = dict(zip(("new", "gone"), each.lines, strict=True))
            fields = {"number": each.number, "pass": each.name, "added": each.added, "removed": each.removed}
            print(json.dumps({**fields, "lines": lines}))
    else:
        print(f"{kernel.name} for {arch}")
        table = Table("", "pass", "added", "removed", "lines")
        for each in found:
            added, removed = ([f"{n} {name}" for name, n in list(c.items())[:MOST]] for c in (each.added, each.removed))
            new, gone = each.lines
            told = f"+{new} -{gone}" if new or gone else "moved"
            table.add_row(str(each.number), each.name, ", ".join(added), ", ".join(removed), told)
        Console().print(table)


def _report(found: Inspection) -> dict[str, object]:
    numbers = {"registers": found.registers, "spilled": found.spilled, "shared": found.shared, "threads": found.threads}
    stages = {
        stage: {"lines": text.count("\n"), "instructions": found.counts(stage)} for stage, text in found.stages.items()
    }
    return {"kernel": found.name, "arch": found.arch, **numbers, **_figures(found.occupancy), "stages": stages}


def _figures(found: Occupancy) -> dict[str, object]:
    return {"blocks": found.blocks, "share": found.share, "limits": found.limits, "blocks_by": found.blocks_by}
