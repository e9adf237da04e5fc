"""Transfers of delta rules (kernels/scans/transfer.py).

A token multiplies the state by (I - β k kᵀ) · decay, so a piece has a matrix in place of one decay. One run of the op
finds this matrix and the term that is added. The columns of a state are independent, so the run has both kinds of
columns beside each other: zeros with the values give the added term, and the identity with values of zero gives the
matrix.

Legend: that of op.py, and
    X  columns of both
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.scans.gated_delta.op import DeltaInputs
from ridgeline.kernels.scans.metadata import Pieces, RecurrentOp
from ridgeline.kernels.scans.transfer import Affine


def transfer(pieces: Pieces, op: RecurrentOp, states_NGKV: Tensor, given: DeltaInputs) -> Affine:
    """Return the effect of each piece on a state."""
    heads, width, values = states_NGKV.shape[1:]
    begun_NGKX = states_NGKV.new_zeros(1 + len(pieces.lengths), heads, width, values + width)
    begun_NGKX[..., values:] = torch.eye(width, dtype=states_NGKV.dtype, device=states_NGKV.device)
    op(replace(given, v_TGV=F.pad(given.v_TGV, (0, width))), begun_NGKX, pieces.going_on)
    added_RGKV, matrix_RGKK = begun_NGKX[1:].split((values, width), -1)
    return Affine(matrix_RGKK, added_RGKV)
