"""The least work of a linear map whose weight is in codes."""

from __future__ import annotations

from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.base.weight_format import SUPER, CodedFormat
from ridgeline.kernels.gemm.plain.cost import linear_cost


def coded_linear_cost(
    tokens: int,
    inputs: int,
    outputs: int,
    how: CodedFormat,
    *,
    itemsize: float,
    scale_itemsize: float = 2,
    bias: bool = False,
) -> Cost:
    """Count a linear map whose codes, scales and zeros are read once.

    scale_itemsize: bytes of a scale that is not nested, or of a minimum.
    """
    each = 1 if how.nested else scale_itemsize
    zero = {"middle": 0.0, "levels": 1.0, "minimum": each}[how.zeros]
    outer = (2.0 if how.zeros == "middle" else 4.0) / SUPER if how.nested else 0.0
    stored = how.bits / 8 + (each + zero) / (how.group or inputs) + outer
    return linear_cost(tokens, inputs, outputs, itemsize=itemsize, weight_itemsize=stored, bias=bias)
