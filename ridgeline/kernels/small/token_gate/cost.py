"""The least work of the gate of a shared expert."""

from __future__ import annotations

from ridgeline.kernels.base.cost import Cost


def token_gate_cost(tokens: float, width: int, *, itemsize: float) -> Cost:
    """Count y and n as read once, the weight as read once, and the result as written."""
    return Cost(itemsize * (3 * tokens * width + width), float(3 * tokens * width))
