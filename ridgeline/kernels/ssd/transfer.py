"""Transfers of Mamba-2 (kernels/transfer.py): one product for each piece of a row, and no outputs.

Legend: that of op.py, and
    X  channels of a group's heads
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.ssd.op import step_of
from ridgeline.kernels.transfer import Decayed, decayed, wide
from ridgeline.kernels.turns import Pieces


def transfer(
    pieces: Pieces,
    x_THP: Tensor,
    dt_TH: Tensor,
    rate_H: Tensor,
    b_TGS: Tensor,
    dt_bias_H: Tensor,
    dt_min: float,
    dt_max: float,
) -> Decayed:
    """Return what the op does to states; arguments as there."""
    step_TH = step_of(wide(dt_TH), dt_bias_H, dt_min, dt_max)
    groups, shape = b_TGS.shape[1], x_THP.shape[1:]

    def sums(tokens: slice, left_TH1: Tensor) -> Tensor:
        x_TGX = (wide(x_THP[tokens]) * step_TH[tokens, :, None] * left_TH1).flatten(1).unflatten(1, (groups, -1))
        return torch.einsum("tgx,tgs->gxs", x_TGX, wide(b_TGS[tokens])).flatten(0, 1).unflatten(0, shape)

    return decayed(pieces.spans, (step_TH * rate_H)[..., None], sums)
