"""The least work of routing tokens to experts."""

from __future__ import annotations

from ridgeline.core.cost import Cost
from ridgeline.kernels.gemm.cost import linear_cost
from ridgeline.kernels.norm.cost import norm_cost


def route_cost(
    tokens: int, width: int, experts: int, used: int, *, itemsize: float, residual: bool = True, norm: bool = True
) -> Cost:
    """Count the norm and the router's product, without what passes between them on the chip: the normalised x is
    written but not read again, and the scores are not written. Of the routes, each pair's four numbers of 4 bytes are
    written."""
    if not tokens:
        return Cost(0.0, 0.0)
    product = linear_cost(tokens, width, experts, itemsize=itemsize)
    passed = itemsize * tokens * experts
    before = Cost(0.0, 0.0)
    if norm:
        before = norm_cost(tokens, width, itemsize=itemsize, residual=residual)
        passed += itemsize * tokens * width
    routes = Cost(16.0 * tokens * used + 4.0 * (experts + 1), 0.0)
    return Cost(before.bytes + product.bytes + routes.bytes - passed, before.flops + product.flops)
