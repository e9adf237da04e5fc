"""The least work of the rotary embedding."""

from __future__ import annotations

from ridgeline.kernels.base.cost import Cost


def rope_cost(
    tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, *, itemsize: float
) -> Cost:
    """Count queries and keys as read once and written once (the op returns new tensors), and per token an int32
    position and a float32 row of the table. A rotated element takes three FLOPs: two products and a sum."""
    heads = tokens * (num_heads + num_kv_heads)
    return Cost(2 * itemsize * heads * head_dim + tokens * 4 * (1 + rotary_dim), 3.0 * heads * rotary_dim)


def write_kv_cost(tokens: int, num_kv_heads: int, head_dim: int, *, itemsize: float, kv_itemsize: float) -> Cost:
    """Count each token's key and value as read once and written once, and an int32 place as read."""
    return Cost(tokens * (2 * num_kv_heads * head_dim * (itemsize + kv_itemsize) + 4), 0.0)
