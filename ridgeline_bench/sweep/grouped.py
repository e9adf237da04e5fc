"""Experts' products on a Hopper GPU: check every cut of the kernels against float32, then time them.

    ridgeline bench sweep grouped --json results.jsonl [--case gpt-oss-20b]

Every cut is first checked at a few uneven numbers of tokens, some of which go nowhere. "layer" is gate_up and down
together, as they are chosen; "dense" is torch's product of the same size. A limit is the larger of (bytes of touched
experts, rows and results) / 4.42 TB/s and FLOPs / 750 TFLOP/s. runs.py says how it is done.

Legend: see kernels/gemm/experts/op.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.gemm.experts import hopper, op
from ridgeline.kernels.gemm.experts.cases import ExpertsCase
from ridgeline.kernels.gemm.experts.hopper_plans import Stream, Tiles, stream
from ridgeline.kernels.gemm.route.op import Routes
from ridgeline_bench.sweep.sweep import Job, Limit, Sweep

CHECKS = {5: (0.0, 2), 40: (3.0, 3), 333: (1.0, 13)}  # by tokens: skew, and tokens that go nowhere


@dataclass(frozen=True)
class SweptMixture:
    """A mixture's shape, and the numbers of tokens to time. layers: so many that they do not fit into the cache."""

    case: ExpertsCase
    layers: int
    times: tuple[int, ...]

    def plans(self, what: str) -> list[Stream | Tiles]:
        """Return the cuts to check."""
        gated = what == "gate_up"
        inputs, block = (self.case.width, 64) if gated else (self.case.inner, 128)
        cuts = [(64, 16, 8, block, 1), (64, 32, 8, block, 1), (64, 64, 16, block, 1), (64, 128, 32, block, 1)]
        cuts += [(64, 16, 8, block, 2), (64, 32, 16, block, 2), (128, 16, 8, 64, 1), (128, 64, 16, 64, 1)]
        found: list[Stream | Tiles] = [
            stream(rows, tokens, narrow, block, inputs, gated=gated, resident=resident)
            for rows, tokens, narrow, block, resident in cuts
        ]
        return [*found, Tiles()]

    def worth(self, plan: Stream | Tiles, tokens: int) -> bool:
        """Return True if a cut may be the best for so many tokens."""
        average = tokens * self.case.used / self.case.experts
        if isinstance(plan, Tiles):
            return average >= 24
        return average / 4 <= plan.tokens <= max(32, 8 * average) and average <= 130


def mixture(width: int, inner: int, experts: int, used: int, gate: str = "silu", bias: bool = False) -> ExpertsCase:
    return ExpertsCase(1, width, inner, experts, used, gate, bias, add=True)


MODELS = {
    "qwen3-30b-a3b": SweptMixture(mixture(2048, 768, 128, 8), 4, (2, 8, 32, 64, 128, 256, 512, 1024, 2048, 8192)),
    "gpt-oss-20b": SweptMixture(mixture(2880, 2880, 32, 4, "swiglu_clamped", True), 2, (2, 8, 64, 256, 1024, 8192)),
    "mixtral-8x7b": SweptMixture(mixture(4096, 14_336, 8, 2), 1, (8, 64, 1024, 8192)),
}


class ExpertsLayer(NamedTuple):
    up_EGM: Tensor
    down_EMF: Tensor
    bias_EG: Tensor | None
    bias_EM: Tensor | None


class GroupedGiven(NamedTuple):
    """The arguments of both products of a layer. wide: what `dense` multiplies."""

    x_TM: Tensor
    h_PF: Tensor
    layer: ExpertsLayer
    routes: Routes
    add_TM: Tensor
    wide_PM: Tensor | None


def routes_of(case: ExpertsCase, device: torch.device, seed: int) -> Routes:
    """Return random routes, or tensors that have no memory."""
    if device.type != "meta":
        return case.routes(device, seed)
    shapes = ((case.tokens, case.used), (case.tokens, case.used), (case.tokens * case.used,))
    int32, float32 = torch.int32, torch.float32
    expert_TK, weight_TK, token_P = (
        torch.empty(shape, dtype=dtype, device=device)
        for shape, dtype in zip(shapes, (int32, float32, int32), strict=True)
    )
    start_E1 = torch.empty(case.experts + 1, dtype=int32, device=device)
    return Routes(expert_TK, weight_TK, token_P, torch.empty_like(expert_TK), start_E1)


def touched(routes: list[Routes]) -> float:
    """Return how many experts get tokens, on average."""
    return sum(int((one.start_E1.diff() > 0).sum()) for one in routes) / len(routes)


class GroupedSweep(Sweep):
    workload = "experts' products"
    tolerance = 0.03

    def jobs(self) -> list[Job]:
        found = []
        for name, model in MODELS.items():
            both = [(what, plan) for what in ("gate_up", "down") for plan in model.plans(what)]
            for tokens in CHECKS:
                found += [Job(name, what, tokens, cut=plan, timed=False) for what, plan in both]
                found += [Job(name, "layer", tokens, timed=False)]
            for tokens in model.times:
                found += [Job(name, what, tokens, cut=plan) for what, plan in both if model.worth(plan, tokens)]
                found += [Job(name, "layer", tokens)]
                found += [Job(name, "dense", tokens)] if tokens == 8192 else []
        return found

    def shape(self, job: Job) -> ExpertsCase:
        case, (skew, dead) = MODELS[job.case].case, CHECKS.get(job.tokens, (0.0, 0)) if not job.timed else (0.0, 0)
        width, inner, experts = self.small(case.width, 128), self.small(case.inner, 64), self.small(case.experts, 8)
        tokens, dead = self.small(job.tokens, 5), self.small(dead, 2)
        return replace(
            case, tokens=tokens, width=width, inner=inner, experts=experts, used=min(case.used, experts),
            skew=skew, dead=dead,
        )  # fmt: skip

    def arguments(self, job: Job) -> list[GroupedGiven]:
        """Return every layer's arguments. Tokens that go nowhere, and their pairs' rows, hold NaN."""
        case, found = self.shape(job), []
        number = MODELS[job.case].layers if self.device.type == "cuda" else 1
        layers = self.kept("weights", job.case, lambda: [self._layer(case) for _ in range(number)])
        for seed, layer in enumerate(layers):
            x_TM = self.normal(case.tokens, case.width)
            h_PF = self.normal(case.tokens * case.used, case.inner)
            x_TM[case.tokens - case.dead :] = torch.nan
            h_PF[(case.tokens - case.dead) * case.used :] = torch.nan
            wide_PM = x_TM.repeat(case.used, 1) if job.op == "dense" else None
            add_TM = self.normal(case.tokens, case.width)
            found.append(GroupedGiven(x_TM, h_PF, layer, routes_of(case, self.device, seed), add_TM, wide_PM))
        return found

    def _layer(self, case: ExpertsCase) -> ExpertsLayer:
        return ExpertsLayer(
            self.normal(case.experts, 2 * case.inner, case.width).mul_(case.width**-0.5),
            self.normal(case.experts, case.width, case.inner).mul_(case.inner**-0.5),
            self.normal(case.experts, 2 * case.inner) if case.bias else None,
            self.normal(case.experts, case.width) if case.bias else None,
        )

    def launch(self, job: Job, arguments: Any) -> Tensor:
        g, gate = arguments, MODELS[job.case].case.gate
        if job.op == "dense":
            return torch.nn.functional.linear(g.wide_PM, g.layer.up_EGM[0])
        h_PF = g.h_PF
        if job.op != "down":
            h_PF = hopper.grouped_gate_up(g.x_TM, g.layer.up_EGM, g.layer.bias_EG, g.routes, gate, job.cut)
        if job.op == "gate_up":
            return h_PF
        return hopper.grouped_down(h_PF, g.layer.down_EMF, g.layer.bias_EM, g.routes, g.add_TM, job.cut)

    def reference(self, job: Job, arguments: Any) -> Tensor | None:
        if job.timed:
            return None
        g, h_PF = arguments, arguments.h_PF
        if job.op != "down":
            gate = MODELS[job.case].case.gate
            h_PF = op.grouped_gate_up(g.x_TM, g.layer.up_EGM, g.layer.bias_EG, g.routes, gate)
        if job.op == "gate_up":
            return h_PF
        return op.grouped_down(h_PF, g.layer.down_EMF, g.layer.bias_EM, g.routes, g.add_TM)

    def defined(self, job: Job, arguments: Any, result: Tensor) -> Tensor:
        return result[: int(arguments.routes.start_E1[-1])] if job.op == "gate_up" else result

    def limit(self, job: Job, calls: list[Any]) -> Limit:
        """Return the least work. That of a layer is the sum of its products'."""
        case, reached = self.shape(job), touched([g.routes for g in calls])
        rows = 2 * case.tokens * (case.width + case.used * case.inner)
        matrix, flops = reached * case.inner * case.width * 2, 2.0 * case.tokens * case.used * case.inner * case.width
        up, down = self.least(2 * matrix + rows, 2 * flops), self.least(matrix + rows, flops)
        note = f"{reached:.1f} experts"
        if job.op == "layer":
            return Limit(up.seconds + down.seconds, 3 * flops, note)
        if job.op == "dense":
            return self.least(0.0, 2 * flops)
        return replace(up if job.op == "gate_up" else down, note=note)
