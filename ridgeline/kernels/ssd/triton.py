"""Mamba-2's recurrence on a GPU: rows of one token by `triton_walk.py`, longer ones by `prompts.py`. The legend
is that of op.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.ssd.choose import Cut, choose
from ridgeline.kernels.ssd.prompts import scan
from ridgeline.kernels.ssd.triton_walk import Walk, walk
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
    cut: Cut | Walk | None = None,
) -> Tensor:
    y_THP = torch.empty(x_THP.shape, dtype=x_THP.dtype, device=x_THP.device)
    given = (x_THP, dt_TH, rate_H, b_TGS, c_TGS, skip_H, dt_bias_H, dt_min, dt_max, states_NHPS, turns, y_THP)
    one = cut if isinstance(cut, Walk) else None
    if turns.tokens_each == 1:
        walk(*given, "each", one)
        return y_THP
    _, heads, width = x_THP.shape
    many = cut if isinstance(cut, Cut) else choose(heads, width, b_TGS.shape[2])
    walk(*given, "single", one)
    scan(*given, many)
    return y_THP
