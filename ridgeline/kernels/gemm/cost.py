"""Least work of a linear map. T tokens, I inputs, O outputs."""

from __future__ import annotations

from ridgeline.core.cost import Cost


def linear_cost(
    tokens: int, inputs: int, outputs: int, *, itemsize: float, weight_itemsize: float | None = None, bias: bool = False
) -> Cost:
    """x, the weight and the bias read once, y written once: however many tokens share the weight, it moves once.

    Two FLOPs per weight and token, one more per output with a bias. weight_itemsize: bytes per stored weight where that
    differs from the activations' (quantized weights). Less would need a faster matrix product than the schoolbook's.
    """
    stored = (weight_itemsize or itemsize) * inputs * outputs
    moved = itemsize * (tokens * (inputs + outputs) + outputs * bias)
    return Cost(stored + moved, tokens * outputs * (2.0 * inputs + bias)) if tokens else Cost(0.0, 0.0)
