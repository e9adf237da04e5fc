"""Transfers of delta rules (kernels/scans/transfer.py).

A token multiplies the state by (I - β k kᵀ) · decay, so a piece has a matrix in place of one decay. The op itself finds
it, and what is added, in one run: a state's columns know nothing of each other, so the columns of zeros with the values
stand beside those of the identity with values of zero.

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
