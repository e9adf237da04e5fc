"""Cases of routing, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.base.case import Cases, OpCase, as_cases
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.base.routing import RoutingSpec
from ridgeline.kernels.gemm.route.cost import order_cost, route_cost, to_some_cost
from ridgeline.kernels.gemm.route.op import Router, route


@dataclass(frozen=True)
class RouteCase(OpCase):
    """A case for tests and benchmarks.

    dead: so many of the last tokens belong to no request.
    exact: all values are powers of two or small multiples of one, so that the norm is exact and products add up to the
        same in any order. Among many thousand tokens some would otherwise be torn between two experts.
    """

    tokens: int
    width: int
    how: RoutingSpec
    residual: bool = True
    norm: bool = True
    dead: int = 0
    exact: bool = False

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple:
        """Return random inputs, whose products have a standard deviation of about one, and a tally of zeros."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        experts = self.how.experts
        live_T = torch.arange(self.tokens, device=device) < self.tokens - self.dead
        x_TM, residual_TM = normal(self.tokens, self.width), normal(self.tokens, self.width)
        norm_weight_M, router_EM = 1 + 0.3 * normal(self.width), normal(experts, self.width) * self.width**-0.5
        if self.exact:
            x_TM = x_TM.sign() * (2 if self.residual else 1)
            residual_TM, norm_weight_M = -x_TM / 2, norm_weight_M.clamp(0.5, 2).log2().round().exp2()
            router_EM = (router_EM * 512).round() / 512
        return (
            x_TM.to(dtype),
            residual_TM.to(dtype) if self.residual else None,
            norm_weight_M.to(dtype) if self.norm else None,
            0.0 if self.exact else 1e-6,
            Router(
                router_EM.to(dtype),
                normal(experts).to(dtype) if self.how.bias else None,
                0.3 * normal(experts) if self.how.correction else None,
                (1 + 0.3 * normal(experts)).to(dtype) if self.how.expert_scale else None,
                self.how,
            ),
            live_T if self.dead else None,
            torch.zeros(experts, dtype=torch.int64, device=device),
        )

    @property
    def label(self) -> str:
        return f"{self.tokens}x{self.width} to {self.how.top_k} of {self.how.experts} {self.how.score}"

    @property
    def slack(self) -> int:
        return 4 * self.width

    def cost(self, itemsize: int) -> Cost:
        return route_cost(
            self.tokens, self.width, self.how.experts, self.how.top_k, itemsize=itemsize, residual=self.residual,
            norm=self.norm,
        )  # fmt: skip


class RouteToSomeCase(RouteCase):
    """The routes of the same inputs to the second half of the experts."""

    @property
    def slack(self) -> int:
        return 16

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        half = self.how.experts // 2
        return route(*super().inputs(dtype, device, seed))[2], half, half

    def cost(self, itemsize: int) -> Cost:
        return to_some_cost(self.tokens, self.how.experts // 2, self.how.top_k)


class OrderCase(RouteCase):
    """The order of pairs with the experts that the same inputs choose; those of the second half stand for none."""

    @property
    def slack(self) -> int:
        return 16

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        routes, half = route(*super().inputs(dtype, device, seed))[2], self.how.experts // 2
        return routes.expert_TK.clamp(max=half), routes.weight_TK, half

    def cost(self, itemsize: int) -> Cost:
        return order_cost(self.tokens, self.how.experts // 2, self.how.top_k)


SOFTMAX = RoutingSpec(experts=8, top_k=2, renormalize=True)


QWEN3 = RoutingSpec(experts=128, top_k=8, renormalize=True)


GROUPED = RoutingSpec(
    experts=64, top_k=6, score="sigmoid", renormalize=True, scale=2.5, groups=8, top_groups=3, group_score="top2",
    correction=True,
)  # fmt: skip


SPARSEMIXER = RoutingSpec(experts=16, top_k=2, score="sparsemixer", nearness=0.5)


CASES = (
    RouteCase(1, 64, SOFTMAX),
    RouteCase(3, 200, SOFTMAX, residual=False),
    RouteCase(7, 64, RoutingSpec(experts=60, top_k=4, bias=True), norm=False),
    RouteCase(8, 256, QWEN3, dead=3),
    RouteCase(33, 96, GROUPED),
    RouteCase(64, 64, RoutingSpec(experts=32, top_k=4, renormalize=True, bias=True, expert_scale=True)),
    RouteCase(300, 64, QWEN3, dead=1),
    RouteCase(5, 64, SPARSEMIXER),
    RouteCase(150, 96, SPARSEMIXER, dead=2),
)

MIXTURES = ((2048, 768, 128, 8), (4096, 14_336, 8, 2))  # (width, inner width, experts, used) of Qwen3-30B, Mixtral-8x7B
EXACT = [replace(case, exact=True) for case in CASES]
REAL = [
    RouteCase(t, m, RoutingSpec(experts=e, top_k=k, renormalize=True), exact=True)
    for m, _, e, k in MIXTURES
    for t in (1, 8, 64, 256, 8192)
]

SWEPT = [
    RouteCase(t, m, RoutingSpec(experts=e, top_k=k, renormalize=True), exact=True)
    for m, e, k in ((2048, 128, 8), (4096, 8, 2), (2880, 32, 4), (7168, 256, 8))
    for t in (1, 2, 4, 8, 64)
]

OP_CASES = {
    "route": Cases(EXACT, REAL, SWEPT),
    "order_pairs": Cases(as_cases(OrderCase, EXACT), as_cases(OrderCase, REAL)),
    "route_to_some": Cases(as_cases(RouteToSomeCase, EXACT), as_cases(RouteToSomeCase, REAL)),
}
