"""What the two kernels of this folder share on the device. Every function works on tiles in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def summed(x_ptr, residual_ptr, x_offsets, residual_offsets, mask, RESIDUAL: tl.constexpr):
    """x + residual rounded to x's dtype, or x itself; 0 where `mask` is false."""
    s = tl.load(x_ptr + x_offsets, mask=mask, other=0.0)
    if RESIDUAL:
        s = (s.to(tl.float32) + tl.load(residual_ptr + residual_offsets, mask=mask, other=0.0)).to(s.dtype)
    return s
