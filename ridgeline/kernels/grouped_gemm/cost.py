"""The least work of experts' products."""

from __future__ import annotations

from ridgeline.core.cost import Cost


def touched(tokens: float, experts: int, used: int) -> float:
    """Return how many experts `tokens` tokens reach on average, if each chooses `used` different ones uniformly."""
    return experts * (1 - (1 - used / experts) ** tokens)


def grouped_cost(
    tokens: int,
    inputs: int,
    outputs: int,
    *,
    experts: int,
    used: int,
    itemsize: float,
    weight_itemsize: float | None = None,
    bias: bool = False,
    reached: float | None = None,
) -> Cost:
    """Count each reached expert's matrix as read once, each pair's row as read once, and its result as written once.

    reached: how many experts have tokens, where that is known (default: the expectation of uniform routing).
    """
    if not tokens:
        return Cost(0.0, 0.0)
    matrices = touched(tokens, experts, used) if reached is None else reached
    stored = matrices * outputs * ((weight_itemsize or itemsize) * inputs + itemsize * bias)
    moved = itemsize * tokens * used * (inputs + outputs)
    return Cost(stored + moved, tokens * used * outputs * (2.0 * inputs + bias))
