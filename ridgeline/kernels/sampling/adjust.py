"""Bias, min_tokens and penalties on a tile of logits in registers, in the order and with the arithmetic of op.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _num_used(ids_ptr, WIDTH: tl.constexpr):
    """Return the number of entries of a table row up to the last one that is used (unused ones are -1)."""
    place = tl.arange(0, WIDTH)
    return tl.max(tl.where(tl.load(ids_ptr + place) >= 0, place + 1, 0), axis=0)


@triton.jit
def adjusted(
    x,
    token,
    first,
    valid,
    slot,
    position,
    bias_ids_ptr,
    bias_ptr,
    stop_ids_ptr,
    count_ptr,
    seen_ptr,
    min_len_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    bias_ids_stride,
    bias_stride,
    stop_stride,
    count_stride,
    seen_stride,
    int_stride,
    float_stride,
    TILE: tl.constexpr,
    BIAS_WIDTH: tl.constexpr,
    STOP_WIDTH: tl.constexpr,
    PENALTY: tl.constexpr,
):
    """Adjust the logits `x` (float32) of the tokens `token`, which lie in first … first + TILE. A width of 0 leaves
    that step out.

    Biases and stop ids are few. They are loaded one at a time, and only those in this tile touch the registers.
    """
    if BIAS_WIDTH > 0:
        ids_ptr = bias_ids_ptr + slot * bias_ids_stride
        for i in range(_num_used(ids_ptr, BIAS_WIDTH)):
            biased = tl.load(ids_ptr + i)
            if (biased >= first) & (biased < first + TILE):
                x += tl.where(token == biased, tl.load(bias_ptr + slot * bias_stride + i), 0.0)
    if STOP_WIDTH > 0:
        ids_ptr = stop_ids_ptr + slot * stop_stride
        if position < tl.load(min_len_ptr + slot * int_stride):
            for i in range(_num_used(ids_ptr, STOP_WIDTH)):
                stop = tl.load(ids_ptr + i)
                if (stop >= first) & (stop < first + TILE):
                    x = tl.where(token == stop, float("-inf"), x)
    if PENALTY:
        count = tl.load(count_ptr + slot * count_stride + token, mask=valid, other=0)
        seen = (tl.load(seen_ptr + slot * seen_stride + token, mask=valid, other=0) != 0) | (count > 0)
        factor = tl.load(repetition_ptr + slot * float_stride)
        punished = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
        x = tl.where(seen, punished, x)
        x -= tl.load(frequency_ptr + slot * float_stride) * count.to(tl.float32)
        x -= tl.where(count > 0, tl.load(presence_ptr + slot * float_stride), 0.0)
    return x
