"""Linear maps of heads by torch's batched products, which write each head's outputs to where they belong. The legend is
that of op.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.gemm.heads import op


def head_linear(x_THI: Tensor, weight_HOI: Tensor) -> Tensor:
    """Compute `op.head_linear`, with the outputs of a token's heads behind one another: the next product takes them as
    one row, without a copy."""
    if torch.is_grad_enabled() and (x_THI.requires_grad or weight_HOI.requires_grad):
        return op.head_linear(x_THI, weight_HOI)
    y_THO = x_THI.new_empty(*x_THI.shape[:2], weight_HOI.shape[1])
    torch.bmm(x_THI.transpose(0, 1), weight_HOI.mT, out=y_THO.transpose(0, 1))
    return y_THO
