"""The FP8 ops through torch's own products: the weight is turned into x's dtype, a few rows at a time.

Legend:
    T  tokens
    I  inputs
    O  outputs
    S  rows of scales
    C  columns of scales
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.base.weight_format import BLOCK
from ridgeline.kernels.gemm.fp8.op import Fp8, in_buffer
from ridgeline.kernels.gemm.plain.op import in_three
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.small.activation.torch_ops import gated_activation
from ridgeline.kernels.small.norm.torch_ops import rms_norm

PIECE = 1024  # weight rows that are dequantized at once; a multiple of BLOCK


def fp8_linear(x_TI: Tensor | Rounded, weight: Fp8, bias_O: Tensor | None) -> Tensor:
    """Compute `op.fp8_linear`, with the weight rounded to x's dtype. Activations are left as they are."""
    x_TI = x_TI.wide().to(x_TI.dtype) if isinstance(x_TI, Rounded) else x_TI
    pieces = [F.linear(x_TI, rows_OI) for rows_OI in _rows(weight, x_TI.dtype)]
    y_TO = torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0]
    return y_TO if bias_O is None else y_TO + bias_O


fp8_norm_linear = in_three(rms_norm, fp8_linear, gated_activation, in_buffer)


def _rows(weight: Fp8, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the weight's rows in `dtype`, in pieces."""
    each = PIECE // BLOCK if weight.format.block else PIECE
    for rows_OI, scale_SC in zip(weight.weight_OI.split(PIECE), weight.scale_SC.split(each), strict=True):
        yield Fp8(rows_OI, scale_SC, None, weight.format).dequantized().to(dtype)
