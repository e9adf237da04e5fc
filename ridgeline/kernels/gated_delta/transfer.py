"""What pieces of rows do to the states of a delta rule.

A token multiplies the state by (I - β k kᵀ) · decay, so a piece has a matrix in place of one decay. The op itself finds
both: run from zeros it leaves what is added, and run from the identity, with values of zero, the matrix.

Legend: that of op.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.transfer import Affine
from ridgeline.kernels.turns import Pieces, RecurrentOp


def transfer(
    pieces: Pieces, op: RecurrentOp, states_NGKV: Tensor, q_THK: Tensor, k_THK: Tensor, v_TGV: Tensor, *others_T: Tensor
) -> Affine:
    """Return what the op does to states like these. op: takes q, k and v, and then the others."""
    added_RGKV = pieces.ran(op, states_NGKV, q_THK, k_THK, v_TGV, *others_T)
    heads, width = states_NGKV.shape[1:3]
    identity_KK = torch.eye(width, dtype=states_NGKV.dtype, device=states_NGKV.device)
    matrix_NGKK = identity_KK.repeat(1 + len(pieces.lengths), heads, 1, 1)
    op(pieces.going_on, matrix_NGKK, q_THK, k_THK, v_TGV.new_zeros(len(v_TGV), heads, width), *others_T)
    return Affine(matrix_NGKK[1:], added_RGKV)
