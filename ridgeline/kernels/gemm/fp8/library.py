"""Products of 8-bit numbers through torch's libraries (cuBLAS, CUTLASS), for thousands of tokens.

Legend:
    T  tokens
    O  outputs
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.gemm.fp8.eight import Eight
from ridgeline.kernels.gemm.plain.rounded import Rounded


def has(weight: Eight, dtype: torch.dtype) -> bool:
    """Return True if the library's product is worth a thought: its sums of int8 have no scales, and with scales of rows
    it writes bfloat16 alone."""
    return weight.number_OI.dtype != torch.int8 and not weight.blocked and dtype == torch.bfloat16


def product(x: Rounded, weight: Eight, bias_O: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias: [T, O] in the dtype of x.

    Scales of blocks multiply partial sums of 128 inputs, which only kernels of our own do here.
    """
    assert not weight.blocked
    assert not x.grouped
    tokens = len(x.q_TI)
    if weight.number_OI.dtype == torch.int8:
        q_TI = x.q_TI if tokens > 16 else torch.nn.functional.pad(x.q_TI, (0, 0, 0, 17 - tokens))
        sums_TO = torch._int_mm(q_TI, weight.number_OI.T)[:tokens]
        y_TO = (sums_TO * x.scale[:, None] * weight.scale.view(1, -1)).to(x.dtype)
    else:
        # Scales of rows need results in bfloat16
        y_TO = torch._scaled_mm(
            x.q_TI, weight.number_OI.T, x.scale[:, None], weight.scale.view(1, -1), out_dtype=torch.bfloat16,
            use_fast_accum=True,
        ).to(x.dtype)  # fmt: skip
    return y_TO if bias_O is None else y_TO + bias_O
