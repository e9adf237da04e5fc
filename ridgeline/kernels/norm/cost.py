"""Least work of the norms with the residual addition. T rows to normalise, M normalised width."""

from __future__ import annotations

from typing import Literal

from ridgeline.core.cost import Cost

# Per element. rms: square, add up, scale, times weight. layer: add up, centre, square, add up, scale, weight, bias.
FLOPS = {"rms": 4, "layer": 7}


def norm_cost(
    rows: int, width: int, *, itemsize: float, kind: Literal["rms", "layer"] = "rms", residual: bool = False
) -> Cost:
    """x read, y written; with a residual that is read too and the sum written, since the next norm needs it.

    A row fits on chip, so its two passes (statistics, then scaling) cost one read.
    """
    elements = rows * width
    vectors = width * (2 if kind == "layer" else 1)
    return Cost(itemsize * (elements * (4 if residual else 2) + vectors), float(elements * (FLOPS[kind] + residual)))
