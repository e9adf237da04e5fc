"""The least work of routing tokens to experts."""

from __future__ import annotations

from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.small.norm.cost import norm_cost


def route_cost(
    tokens: int, width: int, experts: int, used: int, *, itemsize: float, residual: bool = True, norm: bool = True
) -> Cost:
    """Count the norm and the router's product, without what passes between them on the chip: the normalised x is
    written but not read again, and the scores are not written. Each pair's four numbers of 4 bytes are."""
    if not tokens:
        return Cost(0.0, 0.0)
    read = itemsize * width * (experts if norm else experts + tokens)
    written = 16.0 * tokens * used + 4.0 * (experts + 1)
    product = Cost(read + written, 2.0 * tokens * width * experts)
    return product + norm_cost(tokens, width, itemsize=itemsize, residual=residual) if norm else product


def order_cost(tokens: int, experts: int, used: int) -> Cost:
    """Count each pair's expert as read once, and its place, its token and the experts' starts as written once."""
    return Cost(4.0 * (3 * tokens * used + experts + 1), 0.0)


def to_some_cost(tokens: int, experts: int, used: int) -> Cost:
    """Count three numbers of 4 bytes of every pair, and the experts' starts, as read and written once."""
    return Cost(8.0 * (3 * tokens * used + experts + 1), 0.0)
