"""The least work of Mamba's selective scan."""

from __future__ import annotations

from ridgeline.core.cost import Cost

FLOPS = 7  # per number of the state: rate · step, its exponential, b · (step · x), a product and two sums, times c


def selective_scan_cost(tokens: int, rows: int, channels: int, state_width: int, *, itemsize: float) -> Cost:
    """Count x, dt, z, b and c as read and y as written, the rates as read once, and each row's state, in float32, as
    read once and written once. Every number of the state decays by itself, so no part of it is a matrix product."""
    state = channels * state_width
    vectors = 4 * channels + 2 * state_width
    return Cost(itemsize * tokens * vectors + 4.0 * state + 8.0 * state * rows, float(FLOPS * tokens * state))
