"""Mamba-2's recurrence with the same arithmetic for a token wherever a step begins or ends: token by token.

One compiled kernel serves steps of one token and of many. The state is kept between steps as it is between tokens, in
float32, so it makes no difference to any bit how a row is cut into steps. The legend is that of op.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.ssd.triton_walk import walk
from ridgeline.kernels.turns import Turns


def ssd(
    x_THP: Tensor,
    dt_TH: Tensor,
    rate_H: Tensor,
    b_TGS: Tensor,
    c_TGS: Tensor,
    skip_H: Tensor,
    dt_bias_H: Tensor,
    dt_min: float,
    dt_max: float,
    states_NHPS: Tensor,
    turns: Turns,
) -> Tensor:
    y_THP = torch.empty(x_THP.shape, dtype=x_THP.dtype, device=x_THP.device)
    walk(x_THP, dt_TH, rate_H, b_TGS, c_TGS, skip_H, dt_bias_H, dt_min, dt_max, states_NHPS, turns, y_THP, "all")
    return y_THP
