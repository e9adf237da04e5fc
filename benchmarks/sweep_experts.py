"""Check and time every sensible cut of the kernels for mixtures of experts, on a GPU.

    python benchmarks/sweep_experts.py route gate_up down layer --shape qwen3 --tokens 1 2 4 8

prints for each op and number of tokens one line per cut, the fastest first, with the share of the limit that it reaches
and a star at the cut that `choose` would take. A cut that is wrong gets no time. A captured graph holds many launches
over weights that do not fit the cache together: routers are copied, and each launch routes tokens to other experts.
`layer` times route, gate_up and down, one behind the other, for several layers of their own weights.

Cuts are compiled by several processes first.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from ridgeline.core.cost import Cost
from ridgeline.core.expert_spec import RoutingSpec
from ridgeline.kernels.grouped_gemm import op as grouped
from ridgeline.kernels.grouped_gemm import triton as experts
from ridgeline.kernels.grouped_gemm.choose import Rows, Tiles, choose_down, choose_gate_up
from ridgeline.kernels.grouped_gemm.cost import grouped_down_cost, grouped_gate_up_cost, touched
from ridgeline.kernels.route import op as routing
from ridgeline.kernels.route import triton as router
from ridgeline.kernels.route.choose import Few, Many, choose
from ridgeline.kernels.route.cost import route_cost

# (width, inner width, experts, used experts)
SHAPES = {
    "qwen3": (2048, 768, 128, 8),
    "mixtral": (4096, 14_336, 8, 2),
    "gpt_oss": (2880, 2880, 32, 4),
    "deepseek": (7168, 2048, 256, 8),
}
BANDWIDTH, PEAK = 4.42e12, 750e12  # what an H200 attains, in bytes and FLOPs a second
CACHE = 160 << 20  # more than twice the cache
Call = Callable[[], Any]


def power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def route_plans(tokens: int, width: int, number: int) -> Iterator[Few | Many]:
    chosen = choose(tokens, width, number)
    yield chosen
    if isinstance(chosen, Few):
        for rows, each, warps in itertools.product((1, 2, 4, 8), (1, 2, 4), (2, 4, 8)):
            fits = max(rows, 2 * each) * chosen.block <= 128 * 32 * warps
            programs = -(-number // rows) * -(-tokens // each)
            if fits and each <= tokens and 32 <= programs <= 1056:
                for group in {max(power(tokens), warps), max(each, warps)}:
                    if group * chosen.experts <= 1024 * warps:
                        yield replace(chosen, rows=rows, each=each, group=group, warps=warps)
    for tile, block, warps in itertools.product((16, 32, 64), (64, 128), (4, 8)):
        if tokens > 8 and tile * power(number) <= 2048 * warps:
            for stages in (3, 4, 5):
                if 2 * (tile + power(number)) * block * stages <= 227_000:
                    yield Many(tile, max(16, power(number)), block, warps, stages)


def rows_plans(block: int, together: int) -> Iterator[Rows]:
    for rows, warps in itertools.product((1, 2, 4, 8), (1, 2, 4, 8)):
        if 32 * 8 * warps <= together * rows * block <= 128 * 32 * warps:
            yield Rows(rows, block, warps)


def tiles_plans(tokens: int) -> Iterator[Tiles]:
    for rows, held, block, stages, warps in itertools.product((64, 128), (16, 32, 64, 128), (64, 128), (3, 4), (4, 8)):
        if (rows + held) * block * 2 * stages <= 227_000 and rows * held <= 64 * 32 * warps and held <= 4 * tokens:
            yield Tiles(rows, held, block, warps, stages)


def plans(op: str, tokens: int, shape: tuple[int, int, int, int]) -> list[Any]:
    width, inner, number, used = shape
    if op == "route":
        return list(dict.fromkeys(route_plans(tokens, width, number)))
    pick, sizes = (choose_gate_up, (width, inner)) if op == "gate_up" else (choose_down, (inner, width))
    found: list[Rows | Tiles] = [pick(tokens, *sizes, experts=number, used=used)]
    if tokens <= 8:
        found += rows_plans(max(256, power(sizes[0])), 2 if op == "gate_up" else power(used))
    if tokens >= 4:
        found += tiles_plans(tokens)
    return list(dict.fromkeys(found))


def arguments(op: str, tokens: int, shape: tuple[int, int, int, int]) -> list[tuple]:
    """Return the arguments of enough calls to pass by the cache."""
    width, inner, number, used = shape
    device = torch.device("cuda")
    if op == "route":
        how = RoutingSpec(experts=number, top_k=used, renormalize=True)
        first = routing.Case(tokens, width, how, exact=True).inputs(torch.bfloat16, device)
        weight_EM = first[4].weight_EM
        copies = max(4, min(64, CACHE // weight_EM.nbytes))
        return [(*first[:4], first[4]._replace(weight_EM=weight_EM.clone()), *first[5:]) for _ in range(copies)]
    case = grouped.Case(tokens, width, inner, experts=number, used=used)
    make = case.gate_up_inputs if op == "gate_up" else case.down_inputs
    *before, _, last = make(torch.bfloat16, device)
    copies = max(2, min(32, int(4 * CACHE / cost_of(op, tokens, shape).bytes)))
    return [(*before, case.routes(device, seed), last) for seed in range(copies)]


def cost_of(op: str, tokens: int, shape: tuple[int, int, int, int]) -> Cost:
    """Return the least work, with as many experts as uniform routing reaches."""
    width, inner, number, used = shape
    if op == "route":
        return route_cost(tokens, width, number, used, itemsize=2)
    reached = touched(tokens, number, used)
    if op == "gate_up":
        return grouped_gate_up_cost(tokens, width, inner, used=used, reached=reached, kind="silu", itemsize=2)
    return grouped_down_cost(tokens, inner, width, used=used, reached=reached, itemsize=2)


def limit(op: str, tokens: int, shape: tuple[int, int, int, int]) -> float:
    """Return the least seconds."""
    cost = cost_of(op, tokens, shape)
    if op == "route":
        return cost.bytes / BANDWIDTH
    return max(cost.bytes / BANDWIDTH, cost.flops / PEAK)


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "route": (router.route, routing.route),
    "gate_up": (experts.grouped_gate_up, grouped.grouped_gate_up),
    "down": (experts.grouped_down, grouped.grouped_down),
}


def flat(result: Any) -> list[torch.Tensor]:
    return [t for part in result for t in flat(part)] if isinstance(result, tuple) else [result]


def wrong(got: Any, want: Any) -> str:
    """Return how far off a result is, or ""."""
    for ours, theirs in zip(flat(got), flat(want), strict=True):
        off = (ours.float() - theirs.float()).abs() - 0.02 * theirs.float().abs()
        most = float(off.nan_to_num(torch.inf).max())
        if most > (0.05 if ours.dtype == torch.bfloat16 else 1e-4 if ours.is_floating_point() else 0):
            return f"off by {most:.3g}"
    return ""


def seconds(calls: list[Call]) -> float:
    """Return the seconds of one call, in a captured graph of all of them (best of several replays)."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    best = float("inf")
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1000 / len(calls))
    return best


def compiled(task: tuple[str, int, tuple[int, int, int, int], Any]) -> None:
    """Compile one cut, in a process of its own."""
    op, tokens, shape, plan = task
    with torch.inference_mode():
        try:
            FUNCTIONS[op][0](*arguments(op, tokens, shape)[0], plan=plan)
            torch.cuda.synchronize()
        except Exception as problem:  # the sweep itself will show it
            print(op, plan, type(problem).__name__)


def sweep(op: str, tokens: int, shape: tuple[int, int, int, int]) -> None:
    calls, (function, reference) = arguments(op, tokens, shape), FUNCTIONS[op]
    want, least, lines = reference(*calls[0]), limit(op, tokens, shape), []
    every = plans(op, tokens, shape)
    for plan in [None, *every]:
        options = {} if plan is None else {"plan": plan}
        try:
            error = wrong(function(*calls[0], **options), want)
            time = seconds([lambda a=a, o=options: function(*a, **o) for a in calls]) if not error else float("inf")
        except Exception as problem:
            error, time = f"{type(problem).__name__}: {str(problem).splitlines()[0][:60]}", float("inf")
        star = "*" if plan is not None and plan == every[0] else " "
        lines.append((time, f"{star} {plan or 'as chosen (on Hopper perhaps hopper.py)'} {error}"))
    print(f"\n{op}, {tokens} tokens, {shape}: limit {1e6 * least:.2f} µs", flush=True)
    for time, text in sorted(lines)[:16] + [line for line in sorted(lines)[16:] if "*" in line[1]]:
        print(f"{1e6 * time:9.2f} µs {100 * least / time:5.1f} %  {text}", flush=True)


def layers(tokens: int, shape: tuple[int, int, int, int], count: int = 4) -> None:
    """Time whole layers, as they are chosen."""
    width, inner, number, used = shape
    calls: list[Call] = []
    for seed in range(count):
        how = RoutingSpec(experts=number, top_k=used, renormalize=True)
        a = routing.Case(tokens, width, how).inputs(torch.bfloat16, torch.device("cuda"), seed)
        options: Any = {"dtype": torch.bfloat16, "device": "cuda"}
        up = torch.randn(number, 2 * inner, width, **options).mul_(width**-0.5)
        down = torch.randn(number, width, inner, **options).mul_(inner**-0.5)

        def layer(a: Any = a, up: torch.Tensor = up, down: torch.Tensor = down) -> None:
            n, _, routes = router.route(*a)
            experts.grouped_down(experts.grouped_gate_up(n, up, None, routes, "silu"), down, None, routes, None)

        calls.append(layer)
    time = seconds(calls * (4 if tokens <= 8 else 1))
    least = sum(limit(op, tokens, shape) for op in FUNCTIONS)
    print(f"\nlayer, {tokens} tokens, {shape}: {1e6 * time:.2f} µs, limit {1e6 * least:.2f} µs: {least / time:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="+", choices=[*FUNCTIONS, "layer"])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--processes", type=int, default=12, help="processes that compile")
    chosen = parser.parse_args()
    shape, ops = SHAPES[chosen.shape], [op for op in chosen.ops if op != "layer"]
    tasks = [(op, t, shape, plan) for op in ops for t in chosen.tokens for plan in plans(op, t, shape)]
    with ProcessPoolExecutor(chosen.processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compiled, tasks, chunksize=4))
    with torch.inference_mode():
        for tokens in chosen.tokens:
            for op in ops:
                sweep(op, tokens, shape)
            if "layer" in chosen.ops:
                layers(tokens, shape)


if __name__ == "__main__":
    main()
