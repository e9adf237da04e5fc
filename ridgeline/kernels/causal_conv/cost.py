"""The least work of the causal convolution."""

from __future__ import annotations

from ridgeline.core.cost import Cost


def causal_conv_cost(
    tokens: float, rows: float, channels: int, length: int, *, itemsize: float, bias: bool = False
) -> Cost:
    """Count inputs as read and outputs as written, and each row's tail as read and written. length: so many inputs make
    an output."""
    numbers = 2 * tokens * channels + 2 * rows * (length - 1) * channels + channels * (length + bias)
    return Cost(itemsize * numbers, float(tokens * channels * (2 * length + bias)))
