"""The least work of the gate behind attention."""

from __future__ import annotations

from ridgeline.kernels.base.cost import Cost

FLOPS = 5  # per element: a negation, an exponential, a sum, a division, and the product


def output_gate_cost(tokens: float, width: int, *, itemsize: float) -> Cost:
    """Count x and its gate as read and y as written."""
    return Cost(3 * itemsize * tokens * width, float(FLOPS * tokens * width))
