"""The least work of Mamba-2's recurrence."""

from __future__ import annotations

from ridgeline.core.cost import Cost


def ssd_cost(
    tokens: int, rows: int, heads: int, head_dim: int, groups: int, state_width: int, *, itemsize: float
) -> Cost:
    """Count x, dt, b and c as read and y as written, and each row's state, in float32, as read once and written once.

    FLOPs are those of the two products that a token's vectors have with the state. Products within chunks come on top:
    they are fewer, the shorter the chunks.
    """
    state = heads * head_dim * state_width
    vectors = 2 * heads * head_dim + 2 * groups * state_width + heads
    return Cost(itemsize * tokens * vectors + 8.0 * state * rows, 4.0 * tokens * state)
