"""The selective scan on a GPU: rows of one token by `triton_walk.py`, longer ones by `triton_tiles.py`, or by the
former in another cut.

Legend: that of op.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.selective_scan.triton_tiles import Tiles, fits, tiles
from ridgeline.kernels.selective_scan.triton_walk import LONG, SHORT, Walk, walk
from ridgeline.kernels.turns import Turns

PROMPTS = Tiles()  # the cut of steps with rows of several tokens, where the kernel fits; elsewhere LONG


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
    cut: Walk | Tiles | None = None,
) -> Tensor:
    y_TX = torch.empty(x_TX.shape, dtype=x_TX.dtype, device=x_TX.device)
    given = (x_TX, dt_TX, rate_XS, b_TS, c_TS, skip_X, dt_bias_X, z_TX, states_NXS, turns, y_TX)
    if turns.tokens_each == 1:
        walk(*given, "each", cut if isinstance(cut, Walk) else SHORT)
        return y_TX
    cut = cut or PROMPTS
    if isinstance(cut, Walk) or not fits(states_NXS.shape[2], b_TS.itemsize):
        walk(*given, "all", cut if isinstance(cut, Walk) else LONG)
        return y_TX
    walk(*given, "single")
    tiles(*given, cut)
    return y_TX
