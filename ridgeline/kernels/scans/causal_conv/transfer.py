"""Transfers of the short convolution (kernels/scans/transfer.py).

Legend: that of op.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.scans.causal_conv.op import ConvInputs
from ridgeline.kernels.scans.metadata import Pieces, RecurrentOp
from ridgeline.kernels.scans.transfer import Shifted


def transfer(pieces: Pieces, op: RecurrentOp, tails_NwX: Tensor, given: ConvInputs) -> Shifted:
    """Return the last inputs of each piece."""
    x_TX, kept, start_R1 = given.x_TX, tails_NwX.shape[1], pieces.going_on.start_R1.long()
    index_Rw = start_R1[1:, None] + torch.arange(-kept, 0, device=x_TX.device)
    count_R = start_R1.diff().clamp(max=kept)
    last_RwX = x_TX[index_Rw.clamp(min=0)] if len(x_TX) else x_TX.new_zeros(*index_Rw.shape, x_TX.shape[1])
    return Shifted(last_RwX, count_R[:, None, None])
