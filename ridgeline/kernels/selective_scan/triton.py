"""The selective scan on a GPU: rows of one token by `triton_walk.py`, longer ones by `triton_scan.py`. The legend is
that of op.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.selective_scan.triton_scan import Tile, scan
from ridgeline.kernels.selective_scan.triton_walk import Walk, walk
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
    cut: Tile | Walk | None = None,
) -> Tensor:
    y_TX = torch.empty(x_TX.shape, dtype=x_TX.dtype, device=x_TX.device)
    given = (x_TX, dt_TX, rate_XS, b_TS, c_TS, skip_X, dt_bias_X, z_TX, states_NXS, turns, y_TX)
    one = cut if isinstance(cut, Walk) else None
    if turns.tokens_each == 1:
        walk(*given, "each", one)
        return y_TX
    walk(*given, "single", one)
    scan(*given, cut if isinstance(cut, Tile) else Tile())
    return y_TX
