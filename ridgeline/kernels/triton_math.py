"""Functions of numbers that several Triton kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), exact to float32's last bits. x is float32.

    The sum 1 + e loses the last bits of a small e. What the logarithm is taken of is then (1 + e) as rounded, and the
    quotient makes up for the difference.
    """
    e = tl.exp(tl.minimum(x, 20.0))
    sum = 1.0 + e
    # The denominator is not 0 where it counts
    corrected = tl.log(sum) * (e / tl.maximum(sum - 1.0, 1e-30))
    return tl.where(x > 20.0, x, tl.where(sum == 1.0, e, corrected))


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def popcount(bits):
    """Return how many bits are set in each int64, in 32 bits."""
    pairs = bits - (bits >> 1 & 0x5555555555555555)
    fours = (pairs & 0x3333333333333333) + (pairs >> 2 & 0x3333333333333333)
    return (((fours + (fours >> 4) & 0x0F0F0F0F0F0F0F0F) * 0x0101010101010101) >> 56).to(tl.int32)
