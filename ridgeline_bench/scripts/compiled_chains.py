"""Chains of pointwise ops and reductions, each compiled to one kernel: the compiler beside Inductor and beside torch op
by op, in turns, and the time in which the memory that must be moved could be copied.

    python -m ridgeline_bench.scripts.compiled_chains --output results.jsonl
    python -m ridgeline_bench.scripts.compiled_chains --print-after      # the first chain after each pass, as text
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from ridgeline.compiler.backend import CompilationStages, backend, compile_graph, decompositions
from ridgeline_bench.results import host
from ridgeline_bench.scripts.asked import OneOf, asked, check_counts, keep, told

Chain = Callable[[Tensor, Tensor], Tensor]


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


CHAINS: tuple[Chain, ...] = (silu_and_multiply, gelu_and_add, softmax, rms_norm, layer_norm, softmax_norm_silu)


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each call; calls of one round follow each other."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(each[2:]) for name, each in times.items()}


def measured(chain: Chain, rows: int, columns: int, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Return milliseconds by way. Raise AssertionError if a way differs from torch."""
    x, w = torch.randn(rows, columns).to(dtype), torch.randn(columns).to(dtype)
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"torch": chain}
    for name, made in (("ridgeline", backend), ("inductor", "inductor")):
        torch._dynamo.reset()
        ways[name] = torch.compile(chain, backend=made, dynamic=False)
        bound = 1e-4 if dtype == torch.float32 else 0.05  # Inductor rounds less often
        torch.testing.assert_close(ways[name](x, w), chain(x, w), rtol=bound, atol=bound)
    out = torch.empty_like(x)
    calls = {name: (lambda way=way: way(x, w)) for name, way in ways.items()}
    return {name: 1e3 * each for name, each in in_turns({**calls, "copy": lambda: out.copy_(x)}, rounds).items()}


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
        print_after=(False, "print the first chain after each pass, and measure nothing"),
        output=(Path, "the file of results"),
    )
    with told():
        check_counts(a, "rows", "columns", "rounds")
        if a.print_after:
            print_after()
            return
        console = Console()
        table = Table(
            "chain", "dtype", "torch, ms", "Inductor, ms", "Ridgeline, ms", "Inductor / Ridgeline", "a copy, ms"
        )
        for chain in CHAINS:
            for name in a.dtypes:
                ms = measured(chain, a.rows, a.columns, getattr(torch, name), a.rounds)
                shown = [f"{ms[way]:.2f}" for way in ("torch", "inductor", "ridgeline")]
                table.add_row(
                    chain.__name__, name, *shown, f"{ms['inductor'] / ms['ridgeline']:.2f}", f"{ms['copy']:.2f}"
                )
                line = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": asdict(host())}
                shape = {"rows": a.rows, "columns": a.columns, "threads": torch.get_num_threads()}
                keep(
                    a.output,
                    {**line, "workload": "compiled chain", "chain": chain.__name__, "dtype": name, **shape, "ms": ms},
                )
        console.print(table)


if __name__ == "__main__":
    main()
