"""Functions of kernels with a delta rule: a token's decay, and the inverse of a chunk's triangular system."""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.base.triton_math import softplus


@triton.jit
def log_decay(a, log_rate, dt_bias):
    """Return the logarithm of what a token leaves of the state before it."""
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    return -tl.exp(log_rate.to(tl.float32)) * softplus(x)


@triton.jit
def inverse(system, i, L: tl.constexpr, PART: tl.constexpr, dtype: tl.constexpr):
    """Return (I - system)⁻¹, system being strictly lower triangular. In a block of two tokens on the diagonal that is
    I + system. Then neighbours become one block of twice the size, until there is one. Up to PART tokens the blocks are
    a batch of small products; from there on products are of the whole, with zeros beside the blocks.

    Entries of both matrices are at most one in size, so float16 has three digits of them: more than the result keeps.
    """
    operand: tl.constexpr = tl.float32 if dtype == tl.float32 else tl.float16
    if PART == 2:
        pair = (i // 2)[:, None] == (i // 2)[None, :]
        result = (i[:, None] == i[None, :]).to(tl.float32) + tl.where(pair, system, 0)
    else:
        block, place = tl.arange(0, L // PART), tl.arange(0, PART)
        same = block[:, None, None, None] == block[None, None, :, None]
        parts = tl.sum(tl.where(same, tl.reshape(system, (L // PART, PART, L // PART, PART)), 0), 2)
        one = place[:, None] == place[None, :]
        pair = (place // 2)[:, None] == (place // 2)[None, :]
        small = tl.where(one[None, :, :], 1.0, 0.0) + tl.where(pair[None, :, :], parts, 0)
        for doubling in tl.static_range(1, 5):
            if 2**doubling < PART:
                small = _doubled(small, parts, _beside(place, 2**doubling)[None, :, :], operand)
        result = tl.reshape(tl.where(same, small[:, :, None, :], 0), (L, L))
    for doubling in tl.static_range(1, 6):
        if 2**doubling >= PART and 2**doubling < L:
            result = _doubled(result, system, _beside(i, 2**doubling), operand)
    return result


@triton.jit
def _beside(i, SIZE: tl.constexpr):
    """Return true for the block below the diagonal of every two neighbours of SIZE."""
    one, two = i // SIZE, i // (2 * SIZE)
    return (two[:, None] == two[None, :]) & (one[:, None] > one[None, :])


@triton.jit
def _doubled(inverse, system, beside, operand: tl.constexpr):
    """Return the inverse whose blocks are twice as large."""
    half = inverse.to(operand)
    step = tl.dot(half, tl.where(beside, system, 0).to(operand), input_precision="ieee")
    return tl.dot(step.to(operand), half, inverse, input_precision="ieee")
