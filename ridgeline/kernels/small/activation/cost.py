"""The least work of the pointwise activations.

Legend:
    T  tokens
    F  intermediate width
"""

from __future__ import annotations

from ridgeline.kernels.base.cost import Cost

# FLOPs per element; an elementary function counts as one. silu has a negation, an exponential, a sum and a division.
FLOPS = {
    "silu": 4,
    "gelu": 5,
    "gelu_tanh": 8,
    "quick_gelu": 5,
    "relu": 1,
    "relu2": 2,
    "swiglu_clamped": 8,
    "silu_clamped_7": 7,
    "silu_clamped_16": 7,
    "xielu": 8,
}


def activation_cost(tokens: float, width: int, *, kind: str, itemsize: float, gated: bool = False) -> Cost:
    """Count [T, F] as read and written. The gated op reads [T, 2F], writes [T, F] and multiplies once more."""
    elements = tokens * width
    return Cost(itemsize * elements * (3 if gated else 2), float(elements * (FLOPS[kind] + gated)))
