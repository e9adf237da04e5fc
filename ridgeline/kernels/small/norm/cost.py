"""The least work of the norms with the residual addition."""

from __future__ import annotations

from typing import Literal

from ridgeline.kernels.base.cost import Cost

# FLOPs per element.
# rms: square, add up, scale, times weight. layer: add up, centre, square, add up, scale, times weight, plus bias.
FLOPS = {"rms": 4, "layer": 7}


def norm_cost(
    rows: int, width: int, *, itemsize: float, kind: Literal["rms", "layer"] = "rms", residual: bool = False
) -> Cost:
    """Count x as read and y as written. A residual is read too, and the sum is written, since the next norm needs it.

    A row fits on chip, so its two passes (statistics, then scaling) cost one read.
    """
    elements = rows * width
    vectors = width * (2 if kind == "layer" else 1)
    return Cost(itemsize * (elements * (4 if residual else 2) + vectors), float(elements * (FLOPS[kind] + residual)))
