"""11. ahead: scores are computed a tile ahead of their softmax.

Idea      In rung 6 a warpgroup waits for a tile's scores before their softmax. Here it has two sets of scores: beside
          the softmax of one run the product that makes the other, and that of the weights before with their values. So
          it waits for neither. In fp8 there are registers for that: weights are a quarter as many as scores.
FLOPs     As rung 6.
Bytes     As rung 6.
Limit     As rung 10, the exponentials and instructions.
Next      Turns besides.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from ridgeline.kernels.attention.ladder.tile import (
    GROWN,
    HALF,
    _as_column,
    _operand,
    _place,
    _rounded,
    _scores,
    _softmax,
    _weighted,
)


@gluon.jit
def _attend(
    i, s, p, o, m, total, q, rings, bars, scales, steps, PART: gl.constexpr, LAST: gl.constexpr,
    STAGES: gl.constexpr, POLYNOMIAL: gl.constexpr, THRESHOLD: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Attend to tile i, whose scores are there. Beside its softmax run the product of the weights before, p, with their
    values, and the scores of the next tile, unless it is the LAST. Nothing is under way before and behind."""
    k, v = rings
    _q_full, k_full, v_full, k_empty, v_empty, _turns = bars
    q_scale, k_scales, v_scales = scales
    dtype: gl.constexpr = q.dtype
    KEYS: gl.constexpr = s.shape[1]
    D: gl.constexpr = q.shape[1]
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32 if FP8 else 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 4 if FP8 else 2)
    grows: gl.constexpr = HALF if FP8 else GROWN
    factor, less = q_scale, 0.0
    if FP8:
        factor = q_scale * gl.load(k_scales + steps - 1 - i)
        less = gl.load(v_scales + steps - 1 - i)
    after, before = (i + 1) % STAGES, (i + STAGES - 1) % STAGES
    if not LAST:
        mbarrier.wait(k_full.index(after), ((i + 1) // STAGES) & 1)
    mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
    operand = _operand(p, dtype, p_layout)  # before any product: between two, ptxas would serialize them
    o = _weighted(operand, v.index(before), o, FP8)
    if not LAST:
        s_after = _scores(q, k.index(after), KEYS, FP8)
    m, weights, total, shrink, grown = _softmax(s, m, total, factor, less, POLYNOMIAL, THRESHOLD, FP8)
    if LAST:
        o = warpgroup_mma_wait(0, deps=(o,))
    else:
        s, o = warpgroup_mma_wait(0, deps=(s_after, o))
        mbarrier.arrive(k_empty.index(after), count=1)
        mbarrier.arrive(v_empty.index(before), count=1)
    p = _rounded(weights, dtype, p_layout)
    if THRESHOLD:
        if gl.max(grown, 0) > grows:
            o = o * _as_column(shrink, o)
    else:
        o = o * _as_column(shrink, o)
    return s, p, o, m, total


@gluon.jit
def _consumer_ahead(
    q, k, v, bars, out_ptr, scale_ptrs, T, heads, per_group, at_once, scale_log2, PART: gl.constexpr,
    D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, POLYNOMIAL: gl.constexpr, THRESHOLD: gl.constexpr,
    FP8: gl.constexpr, LONGEST: gl.constexpr,
):  # fmt: skip
    """Attend with 64 queries, and compute scores a tile ahead."""
    q_full, k_full, v_full, k_empty, _v_empty, _turns = bars
    dtype: gl.constexpr = q.dtype
    q_scale_ptr, k_scale_ptr, v_scale_ptr = scale_ptrs
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32 if FP8 else 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32 if FP8 else 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 4 if FP8 else 2)
    tile, head = _place(T, heads, at_once, LONGEST)
    steps = (gl.minimum(tile * 128 + 128, T) + KEYS - 1) // KEYS
    factor, value_scale = scale_log2, 1.0
    scales = factor, k_scale_ptr, v_scale_ptr
    if FP8:
        blocks = (T + KEYS - 1) // KEYS
        group = head // per_group * blocks
        factor *= gl.load(q_scale_ptr + head * ((T + 63) // 64) + gl.minimum(tile * 2 + PART, (T + 63) // 64 - 1))
        value_scale = gl.load(v_scale_ptr + heads // per_group * blocks + head // per_group)
        scales = factor, k_scale_ptr + group, v_scale_ptr + group
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(k_full.index(0), 0)
    s = _scores(q, k.index(0), KEYS, FP8)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_empty.index(0), count=1)
    query = tile * 128 + PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    key = (steps - 1) * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, s_layout))
    s = gl.where((gl.expand_dims(key, 0) <= gl.expand_dims(query, 1)) & (gl.expand_dims(key, 0) < T), s, float("-inf"))
    m = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, s_layout))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))
    first, less = factor, 0.0
    if FP8:
        first = factor * gl.load(scales[1] + steps - 1)
        less = gl.load(scales[2] + steps - 1)
    m, weights, total, _shrink, _grown = _softmax(s, m, total, first, less, 0, THRESHOLD, FP8)
    p = _rounded(weights, dtype, p_layout)
    o = gl.zeros([64, D], gl.float32, o_layout)
    if steps > 1:
        mbarrier.wait(k_full.index(1), 0)
        s = _scores(q, k.index(1), KEYS, FP8)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(1), count=1)
        for pair in range((steps - 2) // 2):  # two at a time: scores change between two sets of registers
            for odd in gl.static_range(2):
                s, p, o, m, total = _attend(
                    2 * pair + odd + 1, s, p, o, m, total, q, (k, v), bars, scales, steps, PART, False, STAGES,
                    POLYNOMIAL, THRESHOLD, FP8,
                )  # fmt: skip
        if steps % 2 == 1:
            s, p, o, m, total = _attend(
                steps - 2, s, p, o, m, total, q, (k, v), bars, scales, steps, PART, False, STAGES, POLYNOMIAL,
                THRESHOLD, FP8,
            )  # fmt: skip
        s, p, o, m, total = _attend(
            steps - 1, s, p, o, m, total, q, (k, v), bars, scales, steps, PART, True, STAGES, POLYNOMIAL,
            THRESHOLD, FP8,
        )  # fmt: skip
    last = (steps - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((steps - 1) // STAGES) & 1)
    o = _weighted(_operand(p, dtype, p_layout), v.index(last), o, FP8)
    o = warpgroup_mma_wait(0, deps=(o,))
    o = o * _as_column(value_scale / total, o)
    row = tile * 128 + PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, o_layout))
    channel = gl.arange(0, D, gl.SliceLayout(0, o_layout))
    at = (head.to(gl.int64) * T + gl.expand_dims(row, 1)) * D + gl.expand_dims(channel, 0)
    gl.store(out_ptr + at, o.to(out_ptr.dtype.element_ty), mask=gl.expand_dims(row, 1) < T)
