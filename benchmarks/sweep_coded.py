"""Products of weights in codes on a GPU: check them against float64, then time them beside bfloat16's.

    python benchmarks/sweep_coded.py                 the table
    python benchmarks/sweep_coded.py --cuts          other cuts too, of W4 alone

Kernels are compiled first, in many processes that each launch once. Times are of CUDA graphs whose launches take copies
of a weight in turn, so that none is found in the second-level cache. The limit is the bytes of weights and activations
over 4.8 TB/s, or FLOPs over 750 TFLOP/s if that is longer.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch import Tensor

from ridgeline.kernels.activation.op import gated_activation
from ridgeline.kernels.coded_gemm import op
from ridgeline.kernels.coded_gemm import triton as coded
from ridgeline.kernels.coded_gemm.choose import SHARED, Cut, Wide
from ridgeline.kernels.coded_gemm.fragments import Fragments, arranged, unit
from ridgeline.kernels.gemm import triton as plain
from ridgeline.kernels.launch import settle_cache_keys

RATE, FLOPS, CACHE = 4.8e12, 750e12, 150e6
TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024)


@dataclass(frozen=True)
class Matrix:
    """A matrix of Llama-3.1-8B: with a norm and a residual, or with neither."""

    name: str
    rows: int
    inputs: int
    norm: bool = False
    gate: str | None = None


MATRICES = (
    Matrix("qkv", 6144, 4096, norm=True),
    Matrix("o", 4096, 4096),
    Matrix("gate_up", 28_672, 4096, norm=True, gate="silu"),
    Matrix("down", 4096, 14_336),
)
FORMATS = {
    "W4": op.Case(1, 0, 0, op.W4),
    "W4 zeros": op.Case(1, 0, 0, op.W4_ZEROS),
    "MXFP4": op.Case(1, 0, 0, op.MXFP4, scales=torch.uint8),
    "Q4_K": op.Case(1, 0, 0, op.Q4_K),
    "W8": op.Case(1, 0, 0, op.W8),
}


def weight_of(name: str, matrix: Matrix) -> Fragments:
    case = replace(FORMATS[name], in_width=matrix.inputs, out_width=matrix.rows)
    generator = torch.Generator("cuda").manual_seed(1)
    return arranged(op.random_codes(case, torch.device("cuda"), generator))


def inputs(matrix: Matrix, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(tokens)
    x, residual = torch.randn(2, tokens, matrix.inputs, generator=generator, device="cuda").to(torch.bfloat16)
    return x, residual, torch.ones(matrix.inputs, device="cuda", dtype=torch.bfloat16)


def call(matrix: Matrix, tokens: int, weight: Fragments | Tensor, cut: Cut | Wide | None = None) -> Tensor:
    """Multiply as a model does."""
    x, residual, norm = inputs_of[matrix, tokens]
    if isinstance(weight, Tensor):
        if matrix.norm:
            return plain.norm_linear(x, residual, norm, 1e-6, weight, None, matrix.gate)[0]
        return plain.linear(x, weight, None)
    if isinstance(cut, Wide):
        return coded._launch_wide(cut, x, weight, None, matrix.gate)
    if cut is not None:
        fused = matrix.norm and cut.solo
        return coded._launch(
            cut, x, residual if fused else None, norm if fused else None, 1e-6, weight, None, matrix.gate
        )[0]
    if matrix.norm:
        return coded.coded_norm_linear(x, residual, norm, 1e-6, weight, None, matrix.gate)[0]
    return coded.coded_linear(x, weight, None)


inputs_of: dict[tuple[Matrix, int], tuple[Tensor, Tensor, Tensor]] = {}


def prepare(matrix: Matrix, tokens: int) -> None:
    if (matrix, tokens) not in inputs_of:
        inputs_of[matrix, tokens] = inputs(matrix, tokens)


def cuts(matrix: Matrix, tokens: int, bits: int) -> list[Cut | Wide]:
    """Return cuts to try beside the chosen one: of `mma.sync` up to 16 tokens, of warpgroups from 16 on."""
    units, parts = matrix.inputs // 128, 2 if matrix.gate else 1
    found: list[Cut | Wide] = []
    size = 32 if tokens <= 32 else 64
    for tile in (size,) if tokens <= 64 else (64, 128):
        for many in (1, 2) if tokens >= 16 and tile <= 64 else (1,) * (tokens >= 16):
            pairs = matrix.rows // (128 * many) * -(-tokens // tile)
            for split in (1,) if matrix.gate else (1, 2, 4):
                for depth, stages in ((8, 6), (8, 3), (6, 5)):
                    cut = Wide(many, tile, depth, stages, split)
                    fits = cut.shared(128, bits, matrix.gate is not None) <= SHARED
                    if fits and pairs * split >= 60 and (split == 1 or pairs * split <= 132):
                        found.append(cut)
    for warps in (2, 4, 8) if tokens < 16 else ():
        steps = -(-units // warps)
        for many in (1, 2):
            for depth in (1, 2, 4, 7, 8):
                registers = depth * 2 * bits * parts * many
                if steps % depth == 0 and steps >= depth and 8 <= registers <= 64 and units >= warps:
                    found.append(Cut(many, 8 if tokens <= 8 else 16, depth, warps, solo=tokens == 1))
    return found


def compile_one(task: tuple[str, Matrix, int, Cut | Wide | None]) -> str:
    """Launch once, so that the compiled kernel is in the cache. Memory may hold anything."""
    name, matrix, tokens, cut = task
    settle_cache_keys()
    case = replace(FORMATS[name], in_width=matrix.inputs, out_width=32)
    try:
        prepare(matrix, tokens)
        small = op.random_codes(case, torch.device("cuda"), torch.Generator("cuda").manual_seed(1))
        rows = matrix.rows // 32
        big = [x.repeat(rows, 1) if isinstance(x, Tensor) and x.ndim == 2 else x for x in small]
        call(matrix, tokens, Fragments(*big), cut)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{task}: {type(error).__name__}: {error}"[:600]
    return ""


def timed(matrix: Matrix, tokens: int, weights: list[Fragments] | list[Tensor], cut: Cut | Wide | None = None) -> float:
    """Return the microseconds of one product."""
    launches = max(len(weights), 16)
    call(matrix, tokens, weights[0], cut)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            call(matrix, tokens, weights[i % len(weights)], cut)
    graph.replay()
    best = float("inf")
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return best * 1000 / launches


def error(matrix: Matrix, tokens: int, weight: Fragments, exact: Tensor, cut: Cut | Wide | None = None) -> float:
    """Return the largest error over the largest result."""
    x, residual, norm = inputs_of[matrix, tokens]
    if matrix.norm and (cut is None or (isinstance(cut, Cut) and cut.solo)):
        s = (x.float() + residual.float()).to(x.dtype).double()
        x = s * torch.rsqrt(s.square().mean(1, keepdim=True) + 1e-6) * norm.double()
    wanted = x.double() @ exact.T
    wanted = gated_activation(wanted, matrix.gate) if matrix.gate else wanted
    got = call(matrix, tokens, weight, cut).double()
    return float((got - wanted).abs().max() / wanted.abs().max())


def limit(matrix: Matrix, tokens: int, stored: int) -> float:
    moved = stored + 2 * tokens * (matrix.inputs * (3 if matrix.norm else 1) + matrix.rows // (2 if matrix.gate else 1))
    return 1e6 * max(moved / RATE, 2 * tokens * matrix.rows * matrix.inputs / FLOPS)


def copies(weight: Fragments) -> list[Fragments]:
    number = max(2, round(CACHE / weight.nbytes + 1))
    return [weight] + [
        Fragments(*(x.clone() if isinstance(x, Tensor) else x for x in weight)) for _ in range(number - 1)
    ]


def compile_all(tasks: list[tuple[str, Matrix, int, Cut | Wide | None]], processes: int) -> None:
    started = time.perf_counter()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for message in pool.map(compile_one, tasks):
            if message:
                print(message)
    print(f"{len(tasks)} launches compiled in {time.perf_counter() - started:.0f} s", flush=True)


def table(processes: int) -> None:
    """Print the table of all formats and matrices."""
    tasks = [(name, matrix, tokens, None) for tokens in (1, 8, 16, 64, 256) for name in FORMATS for matrix in MATRICES]
    compile_all(tasks, processes)
    for matrix in MATRICES:
        generator = torch.Generator("cuda").manual_seed(1)
        full = torch.randn(matrix.rows, matrix.inputs, generator=generator, device="cuda").to(torch.bfloat16)
        plains = [full, full.clone()]
        for tokens in TOKENS:
            prepare(matrix, tokens)
        took = {tokens: timed(matrix, tokens, plains) for tokens in TOKENS}
        print(f"\n{matrix.name} {matrix.rows} x {matrix.inputs}: µs (% of the limit) at {TOKENS} tokens")
        show("bf16", [(took[t], limit(matrix, t, full.nbytes)) for t in TOKENS])
        for name in FORMATS:
            weight = weight_of(name, matrix)
            exact = weight.dequantized().double()
            worst = max(error(matrix, tokens, weight, exact) for tokens in (1, 4, 8, 16, 64, 256))
            del exact
            several = copies(weight)
            figures = [(timed(matrix, t, several), limit(matrix, t, weight.nbytes)) for t in TOKENS]
            show(name, figures, f"error {worst:.1e}{' WRONG' if not worst < 0.02 else ''}")


def show(name: str, figures: list[tuple[float, float]], note: str = "") -> None:
    print(
        f"{name:9s}" + "".join(f"{took:8.1f} ({best / took:4.0%})" for took, best in figures) + "  " + note, flush=True
    )


def try_cuts(processes: int, names: list[str]) -> None:
    """Print the times of other cuts."""
    at = (16, 64, 256)
    found = {
        (name, matrix, tokens): cuts(matrix, tokens, FORMATS[name].format.bits)
        for name in names
        for matrix in MATRICES
        for tokens in at
    }
    compile_all([(n, m, t, cut) for (n, m, t), some in found.items() for cut in some], processes)
    for (name, matrix, tokens), some in found.items():
        prepare(matrix, tokens)
        weight = weight_of(name, matrix)
        exact = weight.dequantized().double()
        several = copies(weight)
        best = limit(matrix, tokens, weight.nbytes)
        x = inputs_of[matrix, tokens][0]
        chosen = coded.wide_cut_of(x, weight, matrix.gate) or coded.cut_of(x, weight, matrix.gate)
        rows = []
        for cut in some:
            try:
                wrong = error(matrix, tokens, weight, exact, cut)
                rows.append((timed(matrix, tokens, several, cut), wrong, cut))
            except Exception as problem:
                print(f"{cut}: {type(problem).__name__}: {problem}"[:200])
        rows.sort(key=lambda row: row[0])
        print(f"\n{name} {matrix.name}, {tokens} tokens, limit {best:.1f} µs, {unit(weight.format)} inputs a unit")
        for took, wrong, cut in [row for i, row in enumerate(rows) if i < 5 or row[2] == chosen]:
            mark = "  <- chosen" if cut == chosen else ""
            print(f"  {took:7.2f} µs ({best / took:4.0%}) error {wrong:.1e} {cut}{mark}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Check and time products of weights in codes.")
    parser.add_argument("--cuts", nargs="*", choices=list(FORMATS), help="try other cuts, of these formats")
    parser.add_argument("--processes", type=int, default=12)
    arguments = parser.parse_args()
    if arguments.cuts is not None:
        try_cuts(arguments.processes, arguments.cuts or ["W4"])
    else:
        table(arguments.processes)


if __name__ == "__main__":
    main()
