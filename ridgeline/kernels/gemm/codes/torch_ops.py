"""Linear maps of weights in codes through torch's own products: a piece of rows is dequantized at a time.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.gemm.codes.fragments import TILE, rows
from ridgeline.kernels.gemm.codes.op import Coded
from ridgeline.kernels.small.activation.torch_ops import gated_activation
from ridgeline.kernels.small.norm.torch_ops import rms_norm

PIECE = 1 << 24  # numbers that are dequantized at once: 64 MB in float32


def coded_linear(x_TI: Tensor, weight: Coded, bias_O: Tensor | None) -> Tensor:
    """Compute `op.coded_linear`."""
    outputs = weight.code_OB.shape[0]
    each = max(TILE, PIECE // weight.inputs // TILE * TILE)
    pieces = []
    for first in range(0, outputs, each):
        piece_OI = rows(weight, first, first + each).dequantized().to(x_TI.dtype)
        pieces.append(F.linear(x_TI, piece_OI, None if bias_O is None else bias_O[first : first + each]))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def coded_norm_linear(
    x_TI: Tensor,
    residual_TI: Tensor | None,
    norm_weight_I: Tensor,
    eps: float,
    weight: Coded,
    bias_O: Tensor | None,
    gate: str | None,
) -> tuple[Tensor, Tensor]:
    """Compute `op.coded_norm_linear`."""
    n_TI, s_TI = rms_norm(x_TI, residual_TI, norm_weight_I, eps)
    y_TO = coded_linear(n_TI, weight, bias_O)
    return (gated_activation(y_TO, gate) if gate else y_TO), s_TI
