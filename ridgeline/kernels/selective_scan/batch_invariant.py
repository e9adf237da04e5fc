"""The selective scan with the same arithmetic for a token wherever a step begins or ends: token by token.

One compiled kernel serves steps of one token and of many. The state is kept between steps as it is between tokens, in
float32, so it makes no difference to any bit how a row is cut into steps. The legend is that of op.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.selective_scan.triton_walk import walk
from ridgeline.kernels.turns import Turns


def selective_scan(
    x_TX: Tensor,
    dt_TX: Tensor,
    rate_XS: Tensor,
    b_TS: Tensor,
    c_TS: Tensor,
    skip_X: Tensor,
    dt_bias_X: Tensor | None,
    z_TX: Tensor | None,
    states_NXS: Tensor,
    turns: Turns,
) -> Tensor:
    y_TX = torch.empty(x_TX.shape, dtype=x_TX.dtype, device=x_TX.device)
    walk(x_TX, dt_TX, rate_XS, b_TS, c_TS, skip_X, dt_bias_X, z_TX, states_NXS, turns, y_TX, "all")
    return y_TX
