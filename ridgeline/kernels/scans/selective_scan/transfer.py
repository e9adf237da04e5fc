"""Transfers of Mamba (kernels/scans/transfer.py).

Every number of a state decays at a rate of its own, so what tokens add is no product: the op itself finds it.

Legend: that of op.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.scans.metadata import Pieces, RecurrentOp
from ridgeline.kernels.scans.selective_scan.op import ScanInputs
from ridgeline.kernels.scans.transfer import Decayed, wide


def transfer(pieces: Pieces, op: RecurrentOp, states_NXS: Tensor, given: ScanInputs) -> Decayed:
    """Return the effect of each piece on a state."""
    step_TX = given.step_TX(wide(given.dt_TX).dtype)
    total_RX = torch.stack([step_TX[start:end].sum(0) for start, end in pieces.spans])
    return Decayed((total_RX[..., None] * given.rate_XS).exp(), pieces.ran(op, states_NXS, given))
