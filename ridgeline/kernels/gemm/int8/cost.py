"""The least work of a linear map whose weight is int8 levels."""

from __future__ import annotations

from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.gemm.plain.cost import linear_cost


def int8_linear_cost(tokens: int, inputs: int, outputs: int, *, itemsize: float, bias: bool = False) -> Cost:
    """Count a linear map with weights of one byte, and a scale per output that is read."""
    least = linear_cost(tokens, inputs, outputs, itemsize=itemsize, weight_itemsize=1, bias=bias)
    return Cost(least.bytes + itemsize * outputs, least.flops)
