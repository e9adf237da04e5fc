"""Least work of the pointwise activations. T tokens, F intermediate width."""

from __future__ import annotations

from ridgeline.core.cost import Cost

# Per element, an elementary function counted as one: silu has a negation, an exponential, a sum, a division.
FLOPS = {"silu": 4, "gelu": 5, "gelu_tanh": 8}


def activation_cost(tokens: int, width: int, *, kind: str, itemsize: float, gated: bool = False) -> Cost:
    """[T, F] read and written; gated reads [T, 2F], writes [T, F] and multiplies once more."""
    elements = tokens * width
    return Cost(itemsize * elements * (3 if gated else 2), float(elements * (FLOPS[kind] + gated)))
