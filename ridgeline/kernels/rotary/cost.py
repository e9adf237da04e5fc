"""Least work of the rotary embedding. T tokens, H query heads, G key heads, D head width, R rotated width."""

from __future__ import annotations

from ridgeline.core.cost import Cost


def rope_cost(
    tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, *, itemsize: float
) -> Cost:
    """Queries and keys read once and written once (the op returns new tensors), per token an int32 position and a
    float32 row of the table. Three FLOPs per rotated element: two products and a sum.
    """
    heads = tokens * (num_heads + num_kv_heads)
    return Cost(2 * itemsize * heads * head_dim + tokens * 4 * (1 + rotary_dim), 3.0 * heads * rotary_dim)
