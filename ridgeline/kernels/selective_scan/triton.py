"""The selective scan on a GPU: rows of one token each by `triton_walk.py`, any others by it in another cut, or by
`triton_tiles.py`.

Legend: that of op.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.selective_scan.triton_tiles import Tiles, fits, run
from ridgeline.kernels.selective_scan.triton_walk import LONG, SHORT, Walk, walk
from ridgeline.kernels.turns import Turns

PROMPTS: Walk | Tiles = LONG  # the cut of steps whose rows have several tokens


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
    each = turns.tokens_each == 1
    cut = cut or (SHORT if each else PROMPTS)
    if isinstance(cut, Tiles) and fits(states_NXS.shape[2], b_TS.itemsize):
        run(*given, cut)
    else:
        walk(*given, "each" if each else "all", cut if isinstance(cut, Walk) else LONG)
    return y_TX
