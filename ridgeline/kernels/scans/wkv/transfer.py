"""Transfers of RWKV (kernels/scans/transfer.py): sums over a common factor are joined with sums over another.

Legend: that of op.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.scans.metadata import Pieces, RecurrentOp
from ridgeline.kernels.scans.transfer import Transfer
from ridgeline.kernels.scans.wkv.op import NOTHING, WkvInputs


@dataclass(frozen=True)
class Weighed(Transfer):
    """Sums that are joined with those in front.

    added_R3X: the states behind pieces that begin with nothing. decay_RX: the logarithm of what a piece leaves of
    the weights in front of it."""

    added_R3X: Tensor
    decay_RX: Tensor

    def after(self, states_R: Tensor) -> Tensor:
        exponent_RX, new_RX = states_R[:, 2] + self.decay_RX, self.added_R3X[:, 2]
        top_RX = torch.maximum(exponent_RX, new_RX)
        old_R1X, own_R1X = ((each - top_RX).exp()[:, None] for each in (exponent_RX, new_RX))
        return torch.cat((old_R1X * states_R[:, :2] + own_R1X * self.added_R3X[:, :2], top_RX[:, None]), 1)

    @staticmethod
    def begun(states_R: Tensor, fresh_R: Tensor) -> Tensor:
        states_R = Transfer.begun(states_R, fresh_R)
        states_R[:, 2].masked_fill_(fresh_R[:, None], NOTHING)
        return states_R


def transfer(pieces: Pieces, op: RecurrentOp, states_N3X: Tensor, given: WkvInputs) -> Weighed:
    """Return the effect of each piece on a state."""
    lengths_R = pieces.going_on.start_R1.diff()
    nothing_R3X = Weighed.begun(pieces.ran(op, states_N3X, given), lengths_R == 0)
    return Weighed(nothing_R3X, lengths_R[:, None] * given.decay_X)
