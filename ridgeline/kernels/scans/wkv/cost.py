"""The least work of RWKV's weighted mean."""

from __future__ import annotations

from ridgeline.kernels.base.cost import Cost


def wkv_cost(tokens: int, rows: int, channels: int, *, itemsize: float) -> Cost:
    """Count keys and values as read, outputs as written, the decays and bonuses once, and each row's state, in float32,
    as read once and written once. An exponential counts as one operation: a token has four of them a channel, and
    eighteen others."""
    return Cost(3.0 * itemsize * tokens * channels + 8.0 * channels + 24.0 * rows * channels, 22.0 * tokens * channels)
