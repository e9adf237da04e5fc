"""Transfers of linear attention (kernels/scans/transfer.py): one product for each piece of a row, and no outputs.

Legend: that of op.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.scans.linear_attention.op import LinearInputs
from ridgeline.kernels.scans.metadata import Pieces, RecurrentOp
from ridgeline.kernels.scans.transfer import Decayed, decayed, wide


def transfer(pieces: Pieces, op: RecurrentOp, states_NHKV: Tensor, given: LinearInputs) -> Decayed:
    """Return the effect of each piece on a state."""
    k_THK, v_THV, decay = given.k_THK, given.v_THV, given.decay
    decay = wide(decay.expand(len(k_THK), -1) if decay.dim() == 1 else decay)

    def sums(tokens: slice, left_THJ: Tensor) -> Tensor:
        return torch.einsum("thk,thv->hkv", wide(k_THK[tokens]) * left_THJ, wide(v_THV[tokens]))

    return decayed(pieces.spans, decay if decay.dim() == 3 else decay[..., None], sums)
