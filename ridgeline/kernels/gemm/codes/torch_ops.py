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
from ridgeline.kernels.gemm.plain.op import in_three
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


coded_norm_linear = in_three(rms_norm, coded_linear, gated_activation)
