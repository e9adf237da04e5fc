"""Linear maps of int8 weights: by torch's int8 kernel for few tokens, by its plain products for many.

The legend is that of op.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.gemm.plain.levels import Levels

# From so many tokens on torch's int8 kernel is slower than widening the weight in pieces (docs/log.md: at 64 tokens 40
# against 1.8 ms).
MANY_TOKENS = 32
PIECE = 2048  # rows of a weight that are widened at once, so that they are still in the cache when they are multiplied


def int8_linear(x_TI: Tensor, weight: Levels, bias_O: Tensor | None) -> Tensor:
    """Compute `op.int8_linear`. The sum is rounded before the bias is added."""
    level_OJ, scale_O, _ = weight
    x_TJ = F.pad(x_TI, (0, level_OJ.shape[1] - x_TI.shape[1])).contiguous()
    if len(x_TJ) < MANY_TOKENS or x_TJ.dtype == torch.float16:  # in float16 sums of levels could overflow
        y_TO = torch._weight_int8pack_mm(x_TJ, level_OJ, scale_O)
    else:  # any other dtype holds the levels exactly
        pieces = [F.linear(x_TJ, levels.to(x_TJ.dtype)) for levels in level_OJ.split(PIECE)]
        y_TO = torch.cat(pieces, dim=-1) * scale_O
    return y_TO if bias_O is None else y_TO + bias_O
