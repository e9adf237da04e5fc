"""The least work of a linear map, alone or with its norm and gate.

Legend:
    O  outputs
    F  outputs of a gated pair
"""

from __future__ import annotations

from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.small.activation.cost import activation_cost
from ridgeline.kernels.small.norm.cost import norm_cost


def linear_cost(
    tokens: int, inputs: int, outputs: int, *, itemsize: float, weight_itemsize: float | None = None, bias: bool = False
) -> Cost:
    """Count x, the weight and the bias as read once, and y as written once: the weight moves once, however many tokens
    share it.

    There are two FLOPs per weight and token, and one more per output with a bias. Fewer would need a faster method than
    the schoolbook's matrix product.

    weight_itemsize: bytes of a stored weight, if they differ from the activations' (quantized weights).
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
    """Count the norm, the product and the gated activation, without what passes between them on the chip.

    The normalised x is neither written nor read again, nor are the 2F values of a gated pair. With a residual the sum
    is written, since the next norm needs it; without one it is x itself.

    outputs: O, or F if gated.
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
