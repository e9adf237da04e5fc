"""The least work of the norm with a gate."""

from __future__ import annotations

from ridgeline.core.cost import Cost

# FLOPs per element: those of an RMS norm (square, add up, scale, times weight) and of a gate (negation, exponential,
# sum, division, and the product with it)
FLOPS = 9


def gated_norm_cost(rows: float, width: int, *, itemsize: float) -> Cost:
    """Count x and its gate as read and y as written. A row fits on chip."""
    return Cost(itemsize * (3 * rows * width + width), float(FLOPS * rows * width))
