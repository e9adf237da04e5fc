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


@triton.jit
def gated(gate, up, KIND: tl.constexpr):
    """act(gate) * up in float32 (the activations as in kernels/activation/op.py)."""
    if KIND == "silu":
        return gate * tl.sigmoid(gate) * up
    elif KIND == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    else:
        tl.static_assert(KIND == "gelu_tanh")
        # (1 + tanh(z)) / 2 is the logistic function of 2z
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
