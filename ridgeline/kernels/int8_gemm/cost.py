"""Least work of a linear map whose weight is int8 levels."""

from __future__ import annotations

from ridgeline.core.cost import Cost
from ridgeline.kernels.gemm.cost import linear_cost


def int8_linear_cost(tokens: int, inputs: int, outputs: int, *, itemsize: float, bias: bool = False) -> Cost:
    """As of a linear map with weights of a byte, and a scale per output read."""
    least = linear_cost(tokens, inputs, outputs, itemsize=itemsize, weight_itemsize=1, bias=bias)
    return Cost(least.bytes + itemsize * outputs, least.flops)
