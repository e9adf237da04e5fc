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
def smooth_step(x):
    """Return log(1 + exp(x)) in 14 instructions, to 2e-7 of it. x is float32.

    With e = exp(-|x|) this is max(x, 0) + log(1 + e), and the second term is e times a polynomial: of degree 9, with
    the least largest relative error between 0 and 1. So no digit of a small e is lost, and neither a logarithm nor a
    quotient is taken, which `softplus` spends 45 instructions on.
    """
    e = tl.exp2(tl.abs(x) * -1.4426950408889634)
    p = e * -0.003243980696424842 + 0.019851261749863625
    p = p * e - 0.056959159672260284
    p = p * e + 0.10603617131710052
    p = p * e - 0.15305569767951965
    p = p * e + 0.19675931334495544
    p = p * e - 0.24954132735729218
    p = p * e + 0.3332996368408203
    p = p * e - 0.4999990165233612
    p = p * e + 1.0
    return p * e + tl.maximum(x, 0.0)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def quick_silu(x):
    """Return x / (1 + exp(-x)) in six instructions, to 4e-7 of it: a root needs no special cases, unlike a quotient."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return x * (root * root)


@triton.jit
def popcount(bits):
    """Return the number of bits set in each int64, as int32."""
    pairs = bits - (bits >> 1 & 0x5555555555555555)
    fours = (pairs & 0x3333333333333333) + (pairs >> 2 & 0x3333333333333333)
    return (((fours + (fours >> 4) & 0x0F0F0F0F0F0F0F0F) * 0x0101010101010101) >> 56).to(tl.int32)
