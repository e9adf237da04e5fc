"""The least work of Mamba-2's recurrence."""

from __future__ import annotations

from ridgeline.kernels.base.cost import Cost

STATE_BYTES = 4  # float32


def ssd_cost(
    tokens: int, rows: int, *, heads: int, groups: int, head_width: int, state_width: int, itemsize: float
) -> Cost:
    """Count x, b, c and dt as read, y as written, and each row's state as read and written.

    FLOPs are those of the recurrence without its decays: a multiply-add for each number of the state to add a token to
    it, and one to multiply it by c.
    """
    state = heads * head_width * state_width
    of_token = itemsize * (2 * heads * head_width + 2 * groups * state_width + heads)
    vectors = 3 * heads * STATE_BYTES
    return Cost(tokens * of_token + 2 * rows * STATE_BYTES * state + vectors, 4.0 * tokens * state)
