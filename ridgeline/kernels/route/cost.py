"""The least work of routing: a norm, the router's products, and what tells the pairs of tokens and experts."""

from __future__ import annotations

from ridgeline.core.cost import Cost

PAIR = 16  # bytes of a pair: its expert, weight, token and place, 4 each


def route_cost(
    tokens: int, width: int, experts: int, used: int, *, itemsize: float, norm: Cost | None = None, bias: bool = False
) -> Cost:
    """Count the router as read once, and every pair as written once. Scores stay on the chip.

    norm: the cost of the norm before it. Without one the tokens' rows are read here.
    """
    if not tokens:
        return Cost(0.0, 0.0)
    rows = tokens * width if norm is None else 0
    moved = itemsize * (rows + experts * (width + bias)) + PAIR * tokens * used + 4 * (experts + 1)
    return Cost(moved, tokens * experts * (2.0 * width + bias)) + (norm or Cost(0.0, 0.0))
