"""The least work of the causal convolution in front of recurrent mixers."""

from __future__ import annotations

from ridgeline.kernels.base.cost import Cost


def causal_conv_cost(tokens: int, rows: int, channels: int, width: int, *, itemsize: float, bias: bool = False) -> Cost:
    """Count inputs as read, outputs as written, each row's tail as read and written, and the weights and biases as read
    once.

    tokens: those of all rows together.
    """
    moved = 2 * tokens + 2 * rows * (width - 1) + width + bias
    return Cost(itemsize * channels * moved, float(tokens * channels * (2 * width + 4)))
