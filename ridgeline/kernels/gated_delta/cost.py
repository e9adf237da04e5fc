"""The least work of the gated delta rule."""

from __future__ import annotations

from ridgeline.core.cost import Cost

STATE_BYTES = 4  # of a number of the state


def gated_delta_cost(
    tokens: float, rows: float, key_heads: int, value_heads: int, key_dim: int, value_dim: int, *, itemsize: float
) -> Cost:
    """Count queries, keys, values, decays and step sizes as read, outputs as written, and each row's state as read and
    written, however many tokens the row has.

    FLOPs are those of the recurrence: for each number of the state its decay, and the multiply-adds of what the state
    says about the key, of its change, and of what it says about the query.
    """
    state = value_heads * key_dim * value_dim
    each = 2 * key_heads * key_dim + 2 * value_heads * value_dim + 2 * value_heads
    return Cost(itemsize * tokens * each + 2 * STATE_BYTES * rows * state, float(7 * tokens * state))
