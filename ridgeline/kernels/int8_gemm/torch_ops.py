"""By torch's kernel for CPUs where tokens are few, by its own products where they are many. Legend as in op.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

MANY_TOKENS = 32  # from which torch's int8 kernel is slower than widening the weight first
PIECE = 2048  # rows of a weight widened at once


def int8_linear(x_TI: Tensor, level_OJ: Tensor, scale_O: Tensor, bias_O: Tensor | None) -> Tensor:
    """As `op.int8_linear`; the sum is rounded before the bias is added."""
    x_TJ = F.pad(x_TI, (0, level_OJ.shape[1] - x_TI.shape[1])).contiguous()
    if len(x_TJ) < MANY_TOKENS or x_TJ.dtype == torch.float16:  # where sums of levels could overflow
        y_TO = torch._weight_int8pack_mm(x_TJ, level_OJ, scale_O)
    else:  # levels are whole in any other dtype: widened piece by piece, in the cache
        pieces = [F.linear(x_TJ, levels.to(x_TJ.dtype)) for levels in level_OJ.split(PIECE)]
        y_TO = torch.cat(pieces, dim=-1) * scale_O
    return y_TO if bias_O is None else y_TO + bias_O
