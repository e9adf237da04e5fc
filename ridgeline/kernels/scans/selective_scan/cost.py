"""The least work of Mamba's selective scan."""

from __future__ import annotations

from ridgeline.kernels.base.cost import Cost

STATE_BYTES = 4  # float32


def selective_scan_cost(
    tokens: int, rows: int, *, channels: int, state_width: int, itemsize: float, gated: bool = True
) -> Cost:
    """Count x, dt, b, c and z as read, y as written, and each row's state as read and written. The rates are weights
    that are read once.

    FLOPs are those of the recurrence: for each number of the state an exponential and its argument, the decay, the two
    products that make up what is added, and a multiply-add for the output.
    """
    state = channels * state_width
    of_token = itemsize * (channels * (4 if gated else 3) + 2 * state_width)
    vectors = STATE_BYTES * (state + 2 * channels)
    return Cost(tokens * of_token + 2 * rows * STATE_BYTES * state + vectors, 7.0 * tokens * state)
