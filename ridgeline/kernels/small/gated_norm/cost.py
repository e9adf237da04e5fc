"""The least work of the gated RMS norm."""

from __future__ import annotations

from ridgeline.kernels.base.cost import Cost

FLOPS = 10  # per element: square, add up, scale, times weight, and the gate with its exponential


def gated_norm_cost(rows: int, width: int, *, itemsize: float) -> Cost:
    """Count x and its gate as read and the result as written."""
    return Cost(itemsize * width * (3 * rows + 1), float(rows * width * FLOPS))
