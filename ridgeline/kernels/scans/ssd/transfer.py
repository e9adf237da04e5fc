"""Transfers of Mamba-2 (kernels/scans/transfer.py): one product for each piece of a row, and no outputs.

Legend: that of op.py, and
    X  channels of a group's heads
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.scans.metadata import Pieces, RecurrentOp
from ridgeline.kernels.scans.ssd.op import SsdInputs
from ridgeline.kernels.scans.transfer import Decayed, decayed, wide


def transfer(pieces: Pieces, op: RecurrentOp, states_NHPS: Tensor, given: SsdInputs) -> Decayed:
    """Return the effect of each piece on a state."""
    step_TH, groups, shape = given.step_TH(wide(given.dt_TH).dtype), given.b_TGS.shape[1], given.x_THP.shape[1:]

    def sums(tokens: slice, left_TH1: Tensor) -> Tensor:
        x_THP = wide(given.x_THP[tokens]) * step_TH[tokens, :, None] * left_TH1
        x_TGX = x_THP.flatten(1).unflatten(1, (groups, -1))
        return torch.einsum("tgx,tgs->gxs", x_TGX, wide(given.b_TGS[tokens])).flatten(0, 1).unflatten(0, shape)

    return decayed(pieces.spans, (step_TH * given.rate_H)[..., None], sums)
