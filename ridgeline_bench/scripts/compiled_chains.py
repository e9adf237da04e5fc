"""Chains of pointwise ops and reductions, each compiled to one kernel: the compiler beside Inductor and beside torch op
by op, in turns, and the time in which the memory that must be moved could be copied.

    python -m ridgeline_bench.scripts.compiled_chains --output results.jsonl
    python -m ridgeline_bench.scripts.compiled_chains --print-after      # the first chain after each pass, as text

On a GPU's machine without MLIR the kernels come from a folder that another machine filled:

    python -m ridgeline_bench.scripts.compiled_chains --carry FOLDER --target sm_90 --rows 16384
    python -m ridgeline_bench.scripts.compiled_chains --device cuda --artifacts FOLDER --rows 16384 --check
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from ridgeline.compiler.artifacts import ArtifactStore
from ridgeline.compiler.backend import CompilationStages, CompilerOptions, backend, compile_graph, decompositions
from ridgeline.compiler.graph import GraphNode
from ridgeline.compiler.mapping import LaneSchedule, gpu_text, lane_schedule
from ridgeline.compiler.program import CompiledProgram
from ridgeline.compiler.targets import CudaTarget, Target, target_of
from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.results import host_with
from ridgeline_bench.scripts.asked import OneOf, asked, check_counts, keep, told

Chain = Callable[[Tensor, Tensor], Any]
CALLS = 10  # on a GPU, between two events
BUSY = 3_000_000  # cycles for which the device waits first, so that the host's way to a launch is not measured
SMALL = ((40, 64), (3, 7), (5, 1), (9, 768), (64, 4096), (7, 5000), (3, 40000))  # shapes of the check
FEW = 2  # of them for float64, and for float16 and rounding once
BOUNDS = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of single numbers


def silu_and_multiply(x: Tensor, w: Tensor) -> Tensor:
    return functional.silu(x) * w


def gelu_and_add(x: Tensor, w: Tensor) -> Tensor:
    return functional.gelu(x + w, approximate="tanh") + x


def softmax(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x * w, -1)


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], w, 1e-6)


def layer_norm(x: Tensor, w: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], w, None, 1e-5)


def softmax_norm_silu(x: Tensor, w: Tensor) -> Tensor:
    return rms_norm(torch.softmax(x * w, -1), w) * functional.silu(x)


def all_functions(x: Tensor, w: Tensor) -> Tensor:
    """What the other chains lack, on numbers that each function has."""
    size = x.abs() + 1
    powers = torch.tanh(x) + torch.erf(x) + torch.sin(x) * torch.cos(w) + torch.exp(-size)
    return torch.where(x > w, powers / size, torch.log(size) - torch.rsqrt(size))


def masked_softmax(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x.masked_fill(x > 1, -torch.inf), -1) * w


def gate(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sum(-1, keepdim=True) * 0.125 - x.amax(-1, keepdim=True)


def sum_and_norm(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A kernel with two outputs."""
    h = x + w
    return rms_norm(h, w), h


CHAINS: tuple[Chain, ...] = (silu_and_multiply, gelu_and_add, softmax, rms_norm, layer_norm, softmax_norm_silu)
CHECKED: tuple[Chain, ...] = (*CHAINS, all_functions, masked_softmax, gate, sum_and_norm)


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int, clock: str = "wall") -> dict[str, float]:
    """Return the median seconds of each call; calls of one round follow each other.

    clock: "wall", "processor" (the time that this process ran, so that waiting for others does not count) or "cuda".
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    timed = _on_gpu if clock == "cuda" else partial(_on_cpu, CLOCKS[clock])
    for turn in range(rounds + 2):
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            times[name].append(timed(calls[name]))
    return {name: statistics.median(each[2:]) for name, each in times.items()}


CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def _on_cpu(clock: Callable[[], float], call: Callable[[], Any]) -> float:
    began = clock()
    call()
    return clock() - began


def _on_gpu(call: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(BUSY)  # type: ignore[no-untyped-call]
    begin.record()  # type: ignore[no-untyped-call]
    for _ in range(CALLS):
        call()
    end.record()  # type: ignore[no-untyped-call]
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / CALLS


def program_of(chain: Chain, x: Tensor, w: Tensor, target: Target, rounding: str = "torch") -> CompiledProgram:
    """Return the program of a chain, traced without Dynamo. The tensors may be fake ones."""
    from functorch.compile import aot_function, make_boxed_func

    made: list[CompiledProgram] = []

    def compiled(graph: torch.fx.GraphModule, _: object) -> Any:
        made.append(compile_graph(graph, target=target, options=CompilerOptions(rounding=rounding)))
        return make_boxed_func(graph.forward)

    aot_function(chain, fw_compiler=compiled, decompositions=decompositions())(x, w)
    return made[0]


def ways_of(chain: Chain, x: Tensor, w: Tensor, options: dict[str, Any]) -> dict[str, Chain]:
    """Return the chain as each way runs it."""
    ways: dict[str, Chain] = {"torch": chain}
    made: dict[str, Any] = {"ridgeline": {"backend": backend, "options": options}, "inductor": {"backend": "inductor"}}
    if x.dtype != torch.float32:
        made["ridgeline, rounded once"] = {"backend": backend, "options": {**options, "rounding": "float32"}}
    for name, each in made.items():
        torch._dynamo.reset()
        ways[name] = torch.compile(chain, dynamic=False, **each)
        ways[name](x, w)
    return ways


def measured(chain: Chain, x: Tensor, w: Tensor, options: dict[str, Any], rounds: int, clock: str) -> dict[str, float]:
    """Return milliseconds by way. Raise AssertionError if a way differs from torch, or, where it rounds once a kernel,
    from float64."""
    ways = ways_of(chain, x, w, options)
    bound = 1e-4 if x.dtype == torch.float32 else 0.05
    expected, wide = chain(x, w), chain(x.double(), w.double()).to(x.dtype)
    for name, way in ways.items():
        nearest = expected if name in ("torch", "ridgeline") else wide
        torch.testing.assert_close(way(x, w), nearest, rtol=bound, atol=bound)
    out = torch.empty_like(x)
    calls = {name: (lambda way=way: way(x, w)) for name, way in ways.items()}
    calls["copy"] = lambda: out.copy_(x)
    return {name: 1e3 * each for name, each in in_turns(calls, rounds, clock).items()}


def checked_cases() -> Iterator[tuple[Chain, tuple[int, int], torch.dtype, str]]:
    """Yield chains, shapes, dtypes and roundings of the check."""
    for chain in CHECKED:
        for at, shape in enumerate(SMALL):
            for dtype in BOUNDS:
                if dtype in (torch.float32, torch.bfloat16) or at < FEW:
                    yield chain, shape, dtype, "torch"
            if at < FEW:
                yield chain, shape, torch.bfloat16, "float32"


def check(store: ArtifactStore, device: str) -> list[str]:
    """Compare programs with torch, and return what differs: one line a case."""
    wrong = []
    target = target_of(torch.device(device), store)
    if target is None:
        raise InvalidConfig(f"there is no target for the device {device}.")
    for chain, shape, dtype, rounding in checked_cases():
        torch.manual_seed(0)
        x, w = torch.randn(shape, device=device).to(dtype), torch.randn(shape[1], device=device).to(dtype)
        name = f"{getattr(chain, '__name__', chain)} {shape} {dtype} rounded as {rounding}"
        try:
            program = program_of(chain, x, w, target, rounding)
            results = program(x, w), _outputs(chain(x, w)), _outputs(chain(x.double(), w.double()))
            for made, expected, exact in zip(*results, strict=True):
                wide = exact.to(dtype)
                # by the size of the row, since sums and differences have errors of it; torch's own error counts too
                scale = expected.double().abs().amax(-1, keepdim=True).clamp_min(1)
                bound = BOUNDS[dtype] * scale + 2 * (expected.double() - wide.double()).abs()
                apart = (made.double() - (wide if rounding == "float32" else expected).double()).abs()
                both = made.isnan() & expected.isnan()
                if not bool(((apart <= bound) | both).all()) or made.dtype != expected.dtype:
                    wrong.append(f"{name}: {(apart / bound).max().item():.2g} times the bound")
            if program.fallbacks or not program.num_kernels:
                wrong.append(f"{name}: {program.num_kernels} kernels, {program.fallbacks} by torch")
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    return wrong


def _outputs(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def carry(folder: Path, target: str, shapes: Sequence[tuple[int, int]], swept: bool) -> int:
    """Compile what the check and the measurement of these shapes need into a folder, and return how many it has.

    swept: for `sweep` as well.
    """
    from torch._subclasses import FakeTensorMode

    made = CudaTarget(target, ArtifactStore([folder]))
    for chain, shape, dtype, rounding in [
        *checked_cases(),
        *(
            (c, s, d, r)
            for c in CHAINS
            for s in shapes
            for d in (torch.float32, torch.bfloat16)
            for r in ("torch", "float32")
        ),
    ]:
        with FakeTensorMode():
            x, w = (torch.empty(size, dtype=dtype, device="cuda") for size in (shape, shape[1:]))
            program = program_of(chain, x, w, made, rounding)
            for why in program.fallbacks:
                print(getattr(chain, "__name__", chain), shape, dtype, rounding, why)
            if swept and shape in shapes and rounding == "float32":
                for schedule in schedules(program.graph.nodes[0]).values():
                    made.artifact(gpu_text(program.graph.nodes[0], schedule=schedule))
    return len(list(folder.glob("*.kernel")))


def schedules(node: GraphNode) -> dict[str, LaneSchedule]:
    """Return ways to map a fused node to a GPU, the chosen one first."""
    chosen = lane_schedule(node)
    found = [chosen, replace(chosen, past_l1=True), replace(chosen, late=False)]
    if chosen.lanes == 0:
        cuts = ((128, 4), (256, 1), (256, 2), (256, 8), (512, 2), (512, 4), (1024, 1))
        found += [replace(chosen, threads=threads, vectors=vectors) for threads, vectors in cuts]
    elif chosen.lanes == chosen.threads:
        whole = chosen.threads * chosen.vectors
        for threads in (128, 256, 512, 1024):
            if threads != chosen.threads and whole % threads == 0:
                found.append(replace(chosen, threads=threads, lanes=threads, vectors=whole // threads))
    return {str(each): each for each in found}


def swept(chain: Chain, x: Tensor, w: Tensor, a: Any) -> dict[str, float]:
    """Return the milliseconds of a chain by ways to map it to the device, and of a copy."""
    store = ArtifactStore([a.artifacts] if a.artifacts else [])
    (node,) = program_of(chain, x, w, CudaTarget(a.target, store), "float32").graph.nodes
    calls: dict[str, Callable[[], Any]] = {"a copy": partial(torch.empty_like(x).copy_, x)}
    for name, schedule in schedules(node).items():
        program = program_of(chain, x, w, CudaTarget(a.target, store, lambda _, chosen=schedule: chosen), "float32")
        if not program.fallbacks:
            calls[name] = partial(program, x, w)
    return {name: 1e3 * each for name, each in in_turns(calls, a.rounds, "cuda").items()}


def sweep(a: Any) -> None:
    """Time ways to map each chain to a GPU, and print them, the fastest first."""
    for chain in CHAINS:
        for dtype in a.dtypes:
            x, w = (
                torch.randn(n, device="cuda").to(getattr(torch, dtype)) for n in ((a.rows, a.columns), (a.columns,))
            )
            ms, called = swept(chain, x, w, a), getattr(chain, "__name__", "")
            print(f"{called} {dtype}", flush=True)
            for name, each in sorted(ms.items(), key=lambda entry: entry[1]):
                print(f"    {each:.4f} ms {100 * ms['a copy'] / each:5.1f} % {name}", flush=True)
            shape = {"chain": called, "dtype": dtype, "rows": a.rows, "columns": a.columns}
            keep(a.output, {**_machine(a), "workload": "compiled chain, schedules", **shape, "ms": ms})


def _machine(a: Any) -> dict[str, object]:
    machine = asdict(host_with(torch.device(a.device), a.commit))
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine}


def print_after() -> None:
    """Print the first chain after each pass, and what its kernel becomes in MLIR."""
    from ridgeline.compiler.linalg import kernel_text
    from ridgeline.compiler.lower import lower

    stages = CompilationStages()

    def shown(graph: torch.fx.GraphModule) -> Any:
        program = compile_graph(graph, stages)
        for name, text in stages.texts.items():
            print(f"// after {name}, {1e3 * stages.seconds[name]:.1f} ms\n{text}\n")
        for node in program.graph.nodes:
            if node.op == "fused":
                kernel = kernel_text(node)
                print(f"// linalg\n{kernel.text}\n")
                lower(kernel, lambda name, told: print(f"// after {name}\n{told}"))
        return program

    from functorch.compile import aot_function, make_boxed_func

    def compiled(graph: torch.fx.GraphModule, _: object) -> Any:
        return make_boxed_func(shown(graph))

    aot_function(CHAINS[0], fw_compiler=compiled, decompositions=decompositions())(
        torch.randn(64, 256), torch.randn(256)
    )


def main() -> None:
    a = asked(
        __doc__,
        rows=(1024, "rows of a tensor"),
        columns=(4096, "columns"),
        rounds=(15, "calls of each way"),
        dtypes=([OneOf(("float32", "bfloat16"))], "of the tensors"),
        device=(OneOf(("cpu", "cuda")), "where to run"),
        clock=(
            OneOf(("wall", "processor")),
            "what times on a CPU are: processor leaves out waiting for other processes",
        ),
        artifacts=(Path, "a folder with kernels"),
        carry=(Path, "fill this folder with kernels for the target, and measure nothing"),
        target=("sm_90", "for which to fill it"),
        check=(False, "compare with torch first, over shapes and dtypes"),
        check_alone=(False, "compare and measure nothing"),
        sweep=(False, "time the ways to map each chain to a GPU"),
        commit=("", "the commit that is measured, where there is no git"),
        print_after=(False, "print the first chain after each pass, and measure nothing"),
        output=(Path, "the file of results"),
    )
    with told():
        check_counts(a, "rows", "columns", "rounds")
        if a.print_after:
            print_after()
        elif a.carry:
            print(f"{carry(a.carry, a.target, ((a.rows, a.columns),), a.sweep)} kernels in {a.carry}")
        else:
            _check_and_measure(a)


def _check_and_measure(a: Any) -> None:
    if a.check or a.check_alone:
        wrong = check(ArtifactStore([a.artifacts] if a.artifacts else []), a.device)
        print(f"{len(list(checked_cases()))} cases compared with torch, {len(wrong)} wrong", *wrong[:30], sep="\n")
        if wrong:
            raise SystemExit(1)
    if a.sweep:
        sweep(a)
    elif not a.check_alone:
        _measure(a)


def _measure(a: Any) -> None:
    console = Console(width=140)
    table = Table(
        "chain", "dtype", "torch, ms", "Inductor", "Ridgeline", "rounded once", "copy", "Inductor / best", "%"
    )
    options = {"artifacts": a.artifacts} if a.artifacts else {}
    for chain in CHAINS:
        for name in a.dtypes:
            dtype = getattr(torch, name)
            x, w = (torch.randn(size, device=a.device).to(dtype) for size in ((a.rows, a.columns), (a.columns,)))
            clock = a.clock if a.device == "cpu" else "cuda"
            ms = measured(chain, x, w, options, a.rounds, clock)
            ways = ("torch", "inductor", "ridgeline", "ridgeline, rounded once", "copy")
            best = min(ms["ridgeline"], ms.get("ridgeline, rounded once", math.inf))
            shown = [f"{ms[way]:.3f}" if way in ms else "" for way in ways]
            called = getattr(chain, "__name__", "")
            table.add_row(called, name, *shown, f"{ms['inductor'] / best:.2f}", f"{100 * ms['copy'] / best:.0f}")
            shape = {
                "rows": a.rows,
                "columns": a.columns,
                "threads": torch.get_num_threads(),
                "device": a.device,
                "clock": clock,
            }
            keep(
                a.output,
                {**_machine(a), "workload": "compiled chain", "chain": called, "dtype": name, **shape, "ms": ms},
            )
    console.print(table)


if __name__ == "__main__":
    main()
