"""Every sensible cut of the Triton kernels for mixtures of experts on a GPU: check it, then time it.

    ridgeline bench sweep experts --op route gate_up down layer --case qwen3 --tokens 1 2 4 8

"layer" is route, gate_up and down, one behind the other, as they are chosen. Launches that take turns have copies of
the router, or routes of other tokens. A limit is the larger of bytes / 4.42 TB/s, with as many experts as uniform
routing reaches, and FLOPs / 750 TFLOP/s. "by itself" is what the op takes (on Hopper perhaps hopper.py); a star marks
what choose.py takes. runs.py says how it is done.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ridgeline.core.specs.experts import RoutingSpec
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.gemm.experts import op as grouped
from ridgeline.kernels.gemm.experts import triton as experts
from ridgeline.kernels.gemm.experts.cases import ExpertsCase
from ridgeline.kernels.gemm.experts.choose import Rows, Tiles, choose_down, choose_gate_up
from ridgeline.kernels.gemm.experts.cost import grouped_down_cost, grouped_gate_up_cost
from ridgeline.kernels.gemm.experts.cost import touched as touched_on_average
from ridgeline.kernels.gemm.route import op as routing
from ridgeline.kernels.gemm.route import triton as router
from ridgeline.kernels.gemm.route.cases import RouteCase
from ridgeline.kernels.gemm.route.choose import Few, Many, choose
from ridgeline.kernels.gemm.route.cost import route_cost
from ridgeline_bench.sweep.grouped import routes_of
from ridgeline_bench.sweep.sweep import Job, Limit, Sweep, moved

Shape = tuple[int, int, int, int]  # width, inner width, experts, used experts
SHAPES: dict[str, Shape] = {
    "qwen3": (2048, 768, 128, 8),
    "mixtral": (4096, 14_336, 8, 2),
    "gpt_oss": (2880, 2880, 32, 4),
    "deepseek": (7168, 2048, 256, 8),
}
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "route": (router.route, routing.route),
    "gate_up": (experts.grouped_gate_up, grouped.grouped_gate_up),
    "down": (experts.grouped_down, grouped.grouped_down),
}


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


def plans(what: str, tokens: int, shape: Shape) -> list[Any]:
    """Return the chosen cut, then others."""
    width, inner, number, used = shape
    if what == "route":
        return list(dict.fromkeys(route_plans(tokens, width, number)))
    pick, sizes = (choose_gate_up, (width, inner)) if what == "gate_up" else (choose_down, (inner, width))
    found: list[Rows | Tiles] = [pick(tokens, *sizes, experts=number, used=used)]
    if tokens <= 8:
        found += rows_plans(max(256, power(sizes[0])), 2 if what == "gate_up" else power(used))
    if tokens >= 4:
        found += tiles_plans(tokens)
    return list(dict.fromkeys(found))


class ExpertsSweep(Sweep):
    workload = "experts' ops"
    tolerance = 1.0

    def jobs(self) -> list[Job]:
        found, ops = [], [*FUNCTIONS, "layer"]
        for case in self.options.case or ["qwen3"]:
            for tokens, what in itertools.product(self.options.tokens or (1, 8, 64), ops):
                found.append(Job(case, what, tokens))
                cuts = plans(what, tokens, SHAPES[case]) if what != "layer" else []
                found += [Job(case, what, tokens, cut=cut, chosen=i == 0) for i, cut in enumerate(cuts)]
        return found

    def shape(self, job: Job) -> tuple[Shape, int]:
        width, inner, number, used = SHAPES[job.case]
        small = self.small(width, 64), self.small(inner, 32), self.small(number, 8), self.small(used, 2)
        return small, self.small(job.tokens, 3)

    def arguments(self, job: Job) -> list[tuple[Any, ...]]:
        shape, tokens = self.shape(job)
        if job.op == "layer":
            number = 4 if self.device.type == "cuda" else 1
            return [(self._router(shape, tokens), *self._matrices(shape)) for _ in range(number)]
        nbytes = self._cost(job.op, tokens, shape).bytes
        if job.op == "route":
            return [self._router(shape, tokens) for _ in range(self.turns(nbytes))]
        width, inner, number, used = shape
        case = ExpertsCase(tokens, width, inner, experts=number, used=used)
        up_EGM, down_EMF = self.kept("weights", job.case, lambda: self._matrices(shape))
        rows = (tokens, width) if job.op == "gate_up" else (tokens * used, inner)
        before = self.normal(*rows), up_EGM if job.op == "gate_up" else down_EMF, None
        last = "silu" if job.op == "gate_up" else None
        # Other tokens' routes, so that more experts than the cache holds take turns
        return [(*before, routes_of(case, self.device, seed), last) for seed in range(self.turns(nbytes / 3, 32))]

    def _router(self, shape: Shape, tokens: int) -> tuple[Any, ...]:
        """Return the arguments of `route`. Numbers are few, so that sums are exact and equal scores stay so."""
        width, _, number, used = shape
        how = RoutingSpec(experts=number, top_k=used, renormalize=True)
        on_cpu = RouteCase(tokens, width, how, exact=True).inputs(self.dtype, torch.device("cpu"))
        return moved(on_cpu, self.device)

    def _matrices(self, shape: Shape) -> tuple[Tensor, Tensor]:
        width, inner, number, _ = shape
        up_EGM = self.normal(number, 2 * inner, width).mul_(width**-0.5)
        return up_EGM, self.normal(number, width, inner).mul_(inner**-0.5)

    def launch(self, job: Job, arguments: Any) -> Any:
        if job.op != "layer":
            options = {} if job.cut is None else {"plan": job.cut}
            return FUNCTIONS[job.op][0](*arguments, **options)
        routed, up_EGM, down_EMF = arguments
        n_TM, _, routes = router.route(*routed)
        h_PF = experts.grouped_gate_up(n_TM, up_EGM, None, routes, "silu")
        return experts.grouped_down(h_PF, down_EMF, None, routes, None)

    def interpreted(self, job: Job) -> Any:
        return (job.op, type(job.cut)) if job.tokens <= 8 and job.cut is not None else None

    def reference(self, job: Job, arguments: Any) -> Any:
        return None if job.op == "layer" else FUNCTIONS[job.op][1](*arguments)

    def error(self, job: Job, got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
        """Return the largest error in units of what is right: 2 % and a rounding more; integers are equal."""
        worst = 0.0
        for ours, theirs in zip(got, want, strict=True):
            if not ours.is_floating_point():
                worst = worst if torch.equal(ours, theirs) else torch.inf
                continue
            bound = 0.02 * theirs.float().abs() + (0.05 if ours.itemsize == 2 else 1e-4)
            worst = max(worst, float(((ours.float() - theirs.float()).abs() / bound).nan_to_num(torch.inf).max()))
        return worst

    def _cost(self, what: str, tokens: int, shape: Shape) -> Cost:
        """Return the least work, with as many experts as uniform routing reaches."""
        width, inner, number, used = shape
        if what == "route":
            return route_cost(tokens, width, number, used, itemsize=2)
        reached = touched_on_average(tokens, number, used)
        if what == "gate_up":
            return grouped_gate_up_cost(tokens, width, inner, used=used, reached=reached, kind="silu", itemsize=2)
        return grouped_down_cost(tokens, inner, width, used=used, reached=reached, itemsize=2)

    def limit(self, job: Job, calls: list[Any]) -> Limit:
        shape, tokens = self.shape(job)
        costs = {what: self._cost(what, tokens, shape) for what in (FUNCTIONS if job.op == "layer" else (job.op,))}
        parts = [self.least(cost.bytes, 0.0 if what == "route" else cost.flops) for what, cost in costs.items()]
        return Limit(sum(part.seconds for part in parts), sum(part.flops for part in parts))
