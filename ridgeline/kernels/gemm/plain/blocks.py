"""Device code that kernels of a few tokens share. It works on tiles in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def summed(x_ptr, residual_ptr, x_offsets, residual_offsets, mask, RESIDUAL: tl.constexpr):
    """Return x + residual rounded to x's dtype, or x itself without a residual; 0 where `mask` is false."""
    s = tl.load(x_ptr + x_offsets, mask=mask, other=0.0)
    if RESIDUAL:
        s = (s.to(tl.float32) + tl.load(residual_ptr + residual_offsets, mask=mask, other=0.0)).to(s.dtype)
    return s


@triton.jit
def fetch_lines(pointers):
    """Bring the cache lines at `pointers` to the cache, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, False, 1
    )
