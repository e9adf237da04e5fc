"""Least work of a linear map, alone or with its norm and gate. T tokens, I inputs, O outputs, F of a gated pair."""

from __future__ import annotations

from ridgeline.core.cost import Cost
from ridgeline.kernels.activation.cost import activation_cost
from ridgeline.kernels.norm.cost import norm_cost


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


def norm_linear_cost(
    tokens: int,
    inputs: int,
    outputs: int,
    *,
    itemsize: float,
    weight_itemsize: float | None = None,
    bias: bool = False,
    residual: bool = True,
    gate: str | None = None,
) -> Cost:
    """The norm, the product and the gated activation, less what passes between them without leaving the chip.

    The normalised x is neither written nor read again, nor are a gated pair's 2F values. outputs: O, or F if gated.
    With a residual the sum is written, since the next norm needs it; without one it is x itself.
    """
    if not tokens:
        return Cost(0.0, 0.0)
    rows = outputs * (2 if gate else 1)
    parts = [
        norm_cost(tokens, inputs, itemsize=itemsize, residual=residual),
        linear_cost(tokens, inputs, rows, itemsize=itemsize, weight_itemsize=weight_itemsize, bias=bias),
    ]
    passed = 2 * tokens * inputs
    if gate:
        parts.append(activation_cost(tokens, outputs, kind=gate, itemsize=itemsize, gated=True))
        passed += 2 * tokens * rows
    moved = sum(part.bytes for part in parts) - itemsize * passed
    return Cost(moved, sum(part.flops for part in parts))
