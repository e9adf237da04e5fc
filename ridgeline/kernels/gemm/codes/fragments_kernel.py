"""Linear maps of weights in fragments, for one token to about a hundred, on NVIDIA's matrix units (`mma.sync`).

A program owns MANY tiles of 16 rows (of each half if gated); its warps share their inputs. Each warp asks for its first
DEPTH units of codes and scales before it waits for the kernel before, since weights are never written. A thread's codes
arrive in its own registers, a few bit operations make operands of them, and no weight passes through shared memory.
That is about 1.6 instructions a code with 4 bits; at the memory's rate there is time for 3.5. Products of a group are
added up in float32 and then multiplied with the group's scale, so scales are not rounded.

With a norm, y = (Σ w·n·s) · rsqrt(mean(s²) + eps); for one token, which each program prepares in shared memory.

Legend:
    W  warps
    R  rows of all tiles of a part
    P  places of a slice, 16
    T  tokens
    U  inputs of a unit, or some of them
    G  groups of a unit
"""

# mypy: disable-error-code="assignment, unreachable"
# ruff: noqa: RUF005 - Gluon knows no starred tuples
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.base.weight_format import CodedFormat
from ridgeline.kernels.gemm.codes.choose import Cut
from ridgeline.kernels.gemm.codes.fragments import TILE, Fragments, span, unit
from ridgeline.kernels.gemm.codes.fragments_asm import instructions, operands, subtracted
from ridgeline.kernels.gemm.codes.op import W4
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand
from ridgeline.kernels.small.activation.triton import gated


@gluon.constexpr_function
def _groups(unit, group):
    """Return the number of scales that a unit has in a row."""
    return max(1, unit // group)


@gluon.constexpr_function
def _held(warps, many, groups):
    """Return the layout [W, R, G] in which threads load scales: those of their rows of the sums, groups together."""
    registers = [[0, 0, 1 << i] for i in range(groups.bit_length() - 1)]
    registers += [[0, 8 << i, 0] for i in range(many.bit_length())]
    lanes = [[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    slots = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, slots, [], [warps, 16 * many, groups])


@gluon.jit
def _split(x, COUNT: gl.constexpr):
    """Return a tuple of the COUNT tensors that lie side by side in the last axis of `x` [W, A, B, COUNT]."""
    if COUNT == 1:
        return (x.reshape([x.shape[0], x.shape[1], x.shape[2]]),)
    else:
        pairs = x.reshape([x.shape[0], x.shape[1], x.shape[2], 2, COUNT // 2]).permute([0, 1, 2, 4, 3])
        first, second = gl.split(pairs)
        return _split(first, COUNT // 2) + _split(second, COUNT // 2)


@gluon.jit
def _words(raw, operand: gl.constexpr):
    """Return the words of a plane as left operands: a tuple of [W, R, P]. raw: [W, many, 256 · tiles]."""
    W: gl.constexpr = raw.shape[0]
    MANY: gl.constexpr = raw.shape[1]
    COUNT: gl.constexpr = raw.shape[2] // 256
    x = raw.reshape([W, MANY, COUNT, 8, 4, 2, 2, 2]).permute([0, 1, 6, 3, 5, 4, 7, 2])
    parts = _split(x.reshape([W, MANY * 16, 16, COUNT]), COUNT)
    out = ()
    for i in gl.static_range(COUNT):
        out = out + (gl.convert_layout(parts[i], operand, assert_trivial=True),)
    return out


@gluon.jit
def _slices(x_WTU, SPAN: gl.constexpr, operand: gl.constexpr):
    """Return the slices of x as right operands: a tuple of [W, P, T]."""
    W: gl.constexpr = x_WTU.shape[0]
    T: gl.constexpr = x_WTU.shape[1]
    COUNT: gl.constexpr = x_WTU.shape[2] // 16
    x = x_WTU.reshape([W, T, COUNT // (SPAN // 16), 4, SPAN // 16, 2, 2]).permute([0, 5, 3, 6, 1, 2, 4])
    parts = _split(x.reshape([W, 16, T, COUNT]), COUNT)
    out = ()
    for i in gl.static_range(COUNT):
        out = out + (gl.convert_layout(parts[i], operand, assert_trivial=True),)
    return out


@gluon.jit
def _each(scale_WRG, layout: gl.constexpr):
    """Return the scales of each group: a tuple of [W, R]."""
    W: gl.constexpr = scale_WRG.shape[0]
    R: gl.constexpr = scale_WRG.shape[1]
    COUNT: gl.constexpr = scale_WRG.shape[2]
    parts = _split(scale_WRG.reshape([W, R, 1, COUNT]), COUNT)
    out = ()
    for i in gl.static_range(COUNT):
        out = out + (gl.convert_layout(parts[i].reshape([W, R]), layout, assert_trivial=True),)
    return out


@gluon.jit
def _number(value):
    """Return scales in float32. Bytes without a sign are exponents of two (E8M0). 0 counts as zero and not as 2**-127,
    which makes no difference to a sum; 255 is not a number, which loaders refuse, and counts as infinity."""
    if value.dtype == gl.uint8:
        return (value.to(gl.int32) << 23).to(gl.float32, bitcast=True)
    else:
        return value.to(gl.float32)


@gluon.jit
def _plane(
    codes, unit, first: gl.constexpr, SIZE: gl.constexpr, WORDS: gl.constexpr, UNITS: gl.constexpr,
    MANY: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Ask for the SIZE words of a plane in the warps' units: [W, many, words]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    slot_W = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    tile_M = gl.arange(0, MANY, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    word_S = gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    at_W = gl.minimum(unit + slot_W, UNITS - 1) * WORDS + first
    at = at_W[:, None, None] + (tile_M * (UNITS * WORDS))[None, :, None] + word_S[None, None, :]
    return gl.load(codes + at, eviction_policy="evict_first")


@gluon.jit
def _scales(
    pointer, unit, UNIT: gl.constexpr, UNITS: gl.constexpr, GROUP: gl.constexpr, MANY: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Ask for the scales of the warps' units: [W, R, G]."""
    COUNT: gl.constexpr = _groups(UNIT, GROUP)
    layout: gl.constexpr = _held(WARPS, MANY, COUNT)
    slot_W = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    row_R = gl.arange(0, MANY * 16, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    group_G = gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    at_W = gl.minimum(unit + slot_W, UNITS - 1)
    if GROUP > UNIT:
        at_W = at_W // (GROUP // UNIT)
    at_R = row_R // 16 * (UNITS * UNIT // GROUP * 16) + row_R % 16 * COUNT
    at = (at_W * (16 * COUNT))[:, None, None] + at_R[None, :, None] + group_G[None, None, :]
    return gl.load(pointer + at)


@gluon.jit
def _fetch(
    from_, step, UNIT: gl.constexpr, UNITS: gl.constexpr, GROUP: gl.constexpr, MANY: gl.constexpr,
    WARPS: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, ZEROS: gl.constexpr, NESTED: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Ask for what the warps need of their units, for each part: (planes, scales, zeros or minima, outer scales, outer
    minima). Scales stand for what there is not."""
    WORDS: gl.constexpr = UNIT * (LOW + HIGH)
    unit = step * WARPS
    slot = ()
    for p in gl.static_range(PARTS):
        codes, scales, minima, outers, outer_minima = from_[p]
        planes = (_plane(codes, unit, 0, UNIT * LOW, WORDS, UNITS, MANY, WARPS),)
        if HIGH:
            planes = planes + (_plane(codes, unit, UNIT * LOW, UNIT * HIGH, WORDS, UNITS, MANY, WARPS),)
        scale = _scales(scales, unit, UNIT, UNITS, GROUP, MANY, WARPS)
        zero, outer, outer_minimum = scale, scale, scale
        if ZEROS != "middle":
            zero = _scales(minima, unit, UNIT, UNITS, GROUP, MANY, WARPS)
        if NESTED:
            outer = _scales(outers, unit, UNIT, UNITS, 256, MANY, WARPS)
            if ZEROS == "minimum":
                outer_minimum = _scales(outer_minima, unit, UNIT, UNITS, 256, MANY, WARPS)
        slot = slot + ((planes, scale, zero, outer, outer_minimum),)
    return slot


@gluon.jit
def _tokens(
    source, unit, first: gl.constexpr, TOKENS: gl.constexpr, WIDTH: gl.constexpr, UNIT: gl.constexpr,
    UNITS: gl.constexpr, WARPS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Load WIDTH inputs of the warps' units of x: [W, T, U], with zeros past the last token and the last unit."""
    x_ptr, x_stride, tokens = source
    unit_W = unit + gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    token_T = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    input_U = first + gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    at = token_T[None, :, None] * x_stride + (unit_W * UNIT)[:, None, None] + input_U[None, None, :]
    kept = (token_T < tokens)[None, :, None] & (unit_W < UNITS)[:, None, None] & (input_U >= 0)[None, None, :]
    return gl.load(x_ptr + at, mask=kept, other=0)


@gluon.jit
def _zeros(PARTS: gl.constexpr, WARPS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, sums: gl.constexpr):
    """Return the parts' sums, all zero."""
    out = ()
    for _ in gl.static_range(PARTS):
        out = out + (gl.zeros([WARPS, ROWS, TOKENS], gl.float32, sums),)
    return out


@gluon.jit
def _with(sums, others, factors, index: gl.constexpr, PARTS: gl.constexpr):
    """Return sums + others · factors for each part. factors: for each part [W, R] of each group. others: one for each
    part, or one for all."""
    out = ()
    for p in gl.static_range(PARTS):
        out = out + (sums[p] + others[p] * _number(factors[p][index])[:, :, None],)
    return out


@gluon.jit
def _unit(
    acc, slot, x, source, step,
    UNIT: gl.constexpr, UNITS: gl.constexpr, SPAN: gl.constexpr, GROUP: gl.constexpr, MANY: gl.constexpr,
    LOW: gl.constexpr, HIGH: gl.constexpr, ASM: gl.constexpr, ZEROS: gl.constexpr, NESTED: gl.constexpr,
    LATE: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr,
    sums: gl.constexpr, left: gl.constexpr, right: gl.constexpr, tokenwise: gl.constexpr,
):  # fmt: skip
    """Return the parts' sums with the products of each warp's unit added.

    x: the slices of the unit. LATE: they are loaded here, span by span, since all of them would fill the registers.
    """
    row: gl.constexpr = gl.SliceLayout(2, sums)
    ROWS: gl.constexpr = MANY * 16
    COUNT: gl.constexpr = _groups(UNIT, GROUP)
    EACH: gl.constexpr = SPAN // 16  # slices of a span
    SPANS: gl.constexpr = UNIT // SPAN // COUNT  # of a group
    low, high, scale, zero, outer, outer_minimum = (), (), (), (), (), ()
    for p in gl.static_range(PARTS):
        planes, scale_WRG, zero_WRG, outer_WRG, outer_minimum_WRG = slot[p]
        low = low + (_words(planes[0], left),)
        high = high + (_words(planes[1], left) if HIGH else (),)
        scale = scale + (_each(scale_WRG, row),)
        zero = zero + (_each(zero_WRG, gl.SliceLayout(2, left) if ZEROS == "levels" else row),)
        outer = outer + (_each(outer_WRG, row),)
        outer_minimum = outer_minimum + (_each(outer_minimum_WRG, row),)
    ones = gl.full([WARPS, ROWS, 16], 1.0, source[0].dtype.element_ty, left)
    whole = _zeros(PARTS, WARPS, ROWS, TOKENS, sums) if NESTED else acc
    less = _zeros(PARTS, WARPS, ROWS, TOKENS, sums)  # what minima take away
    for group in gl.static_range(COUNT):
        part = _zeros(PARTS, WARPS, ROWS, TOKENS, sums)
        total = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, sums)
        for s in gl.static_range(group * SPANS, group * SPANS + SPANS):
            here = x
            if LATE:
                here = _slices(
                    _tokens(source, step * WARPS, s * SPAN, TOKENS, SPAN, UNIT, UNITS, WARPS, tokenwise), SPAN, right
                )
            for j in gl.static_range(EACH):
                x_WPT = here[j if LATE else s * EACH + j]
                grown = ()
                for p in gl.static_range(PARTS):
                    minus = 0
                    if ZEROS == "levels":
                        minus = subtracted(zero[p][group], LOW + HIGH, x_WPT.dtype)[:, :, None]
                    w_WRP = operands(low[p], high[p], minus, s * EACH + j, LOW, HIGH, ASM, ZEROS, x_WPT)
                    grown = grown + (mma_v2(w_WRP, x_WPT, part[p]),)
                part = grown
                if ZEROS == "minimum":
                    total = mma_v2(ones, x_WPT, total)
        whole = _with(whole, part, scale, group, PARTS)
        if ZEROS == "minimum":
            less = _with(less, (total, total), zero, group, PARTS)
    if NESTED:
        whole = _with(acc, whole, outer, 0, PARTS)
    if ZEROS == "minimum":
        grown = ()
        for p in gl.static_range(PARTS):
            by = outer_minimum[p][0].to(gl.float32)[:, :, None] if NESTED else 1.0
            grown = grown + (whole[p] - less[p] * by,)
        whole = grown
    return whole


@gluon.jit
def _chunk(
    acc, slots, early, from_, held, source, chunk,
    UNIT: gl.constexpr, UNITS: gl.constexpr, SPAN: gl.constexpr, GROUP: gl.constexpr, MANY: gl.constexpr,
    LOW: gl.constexpr, HIGH: gl.constexpr, ASM: gl.constexpr, ZEROS: gl.constexpr, NESTED: gl.constexpr,
    LATE: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr,
    SOLO: gl.constexpr, AHEAD: gl.constexpr, MORE: gl.constexpr,
    sums: gl.constexpr, left: gl.constexpr, right: gl.constexpr, tokenwise: gl.constexpr,
):  # fmt: skip
    """Multiply AHEAD units of each warp, and ask for the next ones if there are MORE.

    early: x of the first of them, if it comes from memory and not LATE.
    """
    fresh = ()
    for ahead in gl.static_range(AHEAD):
        step = chunk * AHEAD + ahead
        x = ()
        if SOLO:
            columns = gl.zeros([WARPS, TOKENS, UNIT], source[0].dtype.element_ty, tokenwise)  # for their shape only
            x_WTU, _ = gl.broadcast(held.index(step).load(tokenwise), columns)
            x = _slices(x_WTU, SPAN, right)
        elif not LATE:
            x = _slices(early, SPAN, right)
            early = _tokens(source, (step + 1) * WARPS, 0, TOKENS, UNIT, UNIT, UNITS, WARPS, tokenwise)
        acc = _unit(
            acc, slots[ahead], x, source, step, UNIT, UNITS, SPAN, GROUP, MANY, LOW, HIGH, ASM, ZEROS, NESTED, LATE,
            TOKENS, WARPS, PARTS, sums, left, right, tokenwise,
        )  # fmt: skip
        if MORE:
            fresh = fresh + (
                _fetch(from_, step + AHEAD, UNIT, UNITS, GROUP, MANY, WARPS, LOW, HIGH, ZEROS, NESTED, PARTS),
            )
    return acc, fresh, early


@gluon.jit
def _prepared(
    x_ptr, residual_ptr, norm_ptr, s_ptr, writes, eps,
    UNIT: gl.constexpr, STEPS: gl.constexpr, WARPS: gl.constexpr, inputs: gl.constexpr,
    NORM: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Put the one token into shared memory, times the norm's weight, and return it with the norm's factor."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    layout: gl.constexpr = gl.BlockedLayout([1, 1, UNIT // 32], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    held = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STEPS, WARPS, 1, UNIT], shared)
    slot_W = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    place_U = gl.arange(0, UNIT, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    first_W1U = slot_W[:, None, None] * UNIT + place_U[None, None, :]
    n = ()
    if NORM:
        for step in gl.static_range(STEPS):
            at = first_W1U + step * (WARPS * UNIT)
            n = n + (gl.load(norm_ptr + at, mask=at < inputs, other=0),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = ()
    for step in gl.static_range(STEPS):
        at = first_W1U + step * (WARPS * UNIT)
        s = gl.load(x_ptr + at, mask=at < inputs, other=0)
        if RESIDUAL:
            s = (s.to(gl.float32) + gl.load(residual_ptr + at, mask=at < inputs, other=0).to(gl.float32)).to(s.dtype)
        x = x + (s,)
    squares = gl.zeros([WARPS, 1, UNIT], gl.float32, layout)
    for step in gl.static_range(STEPS):
        s = x[step]
        at = first_W1U + step * (WARPS * UNIT)
        if RESIDUAL:
            gl.store(s_ptr + at, s, mask=(at < inputs) & writes)
        if NORM:
            squares += s.to(gl.float32) * s.to(gl.float32)
            s = (s.to(gl.float32) * n[step].to(gl.float32)).to(s.dtype)
        held.index(step).store(s)
    factor = 1.0
    if NORM:
        factor = gl.rsqrt(gl.sum(gl.sum(gl.sum(squares, 2), 1), 0) / inputs + eps)
    return held, factor


@gluon.jit(do_not_specialize=["tokens"])
def fragments_kernel(
    x_ptr, residual_ptr, norm_ptr, code_ptr, scale_ptr, zero_ptr, outer_ptr, outer_minimum_ptr, factor_ptr, bias_ptr,
    y_ptr, s_ptr, x_stride, tokens, outputs, eps,
    inputs: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, ASM: gl.constexpr, ZEROS: gl.constexpr,
    NESTED: gl.constexpr, GROUP: gl.constexpr, UNIT: gl.constexpr, SPAN: gl.constexpr,
    MANY: gl.constexpr, TOKENS: gl.constexpr, DEPTH: gl.constexpr, WARPS: gl.constexpr,
    SOLO: gl.constexpr,  # there is one token, which is held in shared memory
    LATE: gl.constexpr,  # x is loaded span by span
    NORM: gl.constexpr, RESIDUAL: gl.constexpr, FACTOR: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Compute y [T, O], and s [T, I] with a residual.

    code: int16. LOW, HIGH: bits of the planes; HIGH is 0 if there is only one.
    factor: the factor of the whole weight.
    DEPTH: divides the steps.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    PARTS: gl.constexpr = 1 if GATE == "" else 2
    UNITS: gl.constexpr = inputs // UNIT
    STEPS: gl.constexpr = (UNITS + WARPS - 1) // WARPS
    CHUNKS: gl.constexpr = STEPS // DEPTH
    ROWS: gl.constexpr = MANY * 16
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    tokenwise: gl.constexpr = gl.BlockedLayout([1, 1, SPAN // 4], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])

    from_, slots = (), ()
    for p in gl.static_range(PARTS):
        tile = (gl.program_id(0) * MANY + p * (outputs // 16)).to(gl.int64)
        codes = code_ptr + tile * (UNITS * UNIT * (LOW + HIGH))
        at, outer_at = tile * (inputs // GROUP * 16), tile * (inputs // 256 * 16)
        others = (scale_ptr + at, zero_ptr + at, outer_ptr + outer_at, outer_minimum_ptr + outer_at)
        from_ = from_ + ((codes, others[0], others[1], others[2], others[3]),)
    for step in gl.static_range(DEPTH):
        slots = slots + (_fetch(from_, step, UNIT, UNITS, GROUP, MANY, WARPS, LOW, HIGH, ZEROS, NESTED, PARTS),)

    held, factor = 0, 1.0
    if SOLO:
        held, factor = _prepared(
            x_ptr, residual_ptr, norm_ptr, s_ptr, gl.program_id(0) == 0, eps,
            UNIT, STEPS, WARPS, inputs, NORM, RESIDUAL, PDL,
        )  # fmt: skip
    elif PDL:
        tl.extra.cuda.gdc_wait()

    first_token = gl.program_id(1) * TOKENS
    source = (x_ptr + first_token.to(gl.int64) * x_stride, x_stride, tokens - first_token)
    early = 0
    if not SOLO and not LATE:
        early = _tokens(source, 0, 0, TOKENS, UNIT, UNIT, UNITS, WARPS, tokenwise)
    acc = _zeros(PARTS, WARPS, ROWS, TOKENS, sums)
    for chunk in range(CHUNKS - 1):
        acc, slots, early = _chunk(
            acc, slots, early, from_, held, source, chunk, UNIT, UNITS, SPAN, GROUP, MANY, LOW, HIGH, ASM, ZEROS,
            NESTED, LATE, TOKENS, WARPS, PARTS, SOLO, DEPTH, True, sums, left, right, tokenwise,
        )  # fmt: skip
    acc, _, _ = _chunk(
        acc, slots, early, from_, held, source, CHUNKS - 1, UNIT, UNITS, SPAN, GROUP, MANY, LOW, HIGH, ASM, ZEROS,
        NESTED, LATE, TOKENS, WARPS, PARTS, SOLO, DEPTH, False, sums, left, right, tokenwise,
    )  # fmt: skip

    if FACTOR:
        factor *= gl.load(factor_ptr)
    layout: gl.constexpr = gl.SliceLayout(0, sums)
    row_R = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    token_T = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    y_RT = gl.sum(acc[0], 0) * factor
    if BIAS:
        y_RT += gl.load(bias_ptr + row_R).to(gl.float32)[:, None]
    if GATE != "":
        up_RT = gl.sum(acc[1], 0) * factor
        if BIAS:
            up_RT += gl.load(bias_ptr + outputs + row_R).to(gl.float32)[:, None]
        y_RT = gated(y_RT, up_RT, GATE)
    at_RT = token_T.to(gl.int64)[None, :] * outputs + row_R[:, None]
    gl.store(y_ptr + at_RT, y_RT.to(y_ptr.dtype.element_ty), mask=(token_T < tokens)[None, :] & (row_R >= 0)[:, None])


def _constants(cut: Cut, how: CodedFormat, inputs: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the kernel's constants that follow from a cut and a format."""
    low, high = (*how.planes(), 0)[:2]
    return {
        "inputs": inputs, "LOW": low, "HIGH": high, "ASM": instructions(how, dtype),
        "ZEROS": how.zeros if how.values == "levels" else "middle", "NESTED": how.nested,
        "GROUP": how.group or inputs, "UNIT": unit(how), "SPAN": span(how),
        "MANY": cut.many, "TOKENS": cut.tokens, "DEPTH": cut.depth, "WARPS": cut.warps, "SOLO": cut.solo,
        "LATE": cut.late,
    }  # fmt: skip


def launch(cut: Cut, x: Operand, weight: Fragments, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
    """Return (y, s) as `coded_norm_linear` does. Without a norm s is x; only a solo cut has a norm. x's columns are in
    the order of the weight's."""
    (x_TI, residual_TI, norm_weight_I, eps), (bias_O, gate, *_) = x, epilogue
    (tokens, inputs), how, device = x_TI.shape, weight.format, x_TI.device
    outputs = weight.code_OB.shape[0] // (2 if gate else 1)
    y_TO = torch.empty(tokens, outputs, dtype=x_TI.dtype, device=device)
    s_TI = x_TI if residual_TI is None else torch.empty(tokens, inputs, dtype=x_TI.dtype, device=device)

    def some(x: Tensor | None) -> Tensor:
        """Return x, or any pointer in place of an absent tensor: the kernel reads only what its flags say."""
        return x_TI if x is None else x

    fragments_kernel[(outputs // (TILE * cut.many), triton.cdiv(tokens, cut.tokens))](
        x_TI, some(residual_TI), some(norm_weight_I), weight.code_OB.view(torch.int16), weight.scale_OG,
        some(weight.zero_OG), some(weight.outer_OS), some(weight.outer_minimum_OS), some(weight.scale), some(bias_O),
        y_TO, s_TI, x_TI.stride(0), tokens, outputs, eps, **_constants(cut, how, inputs, x_TI.dtype),
        NORM=norm_weight_I is not None, RESIDUAL=residual_TI is not None, FACTOR=weight.scale is not None,
        BIAS=bias_O is not None, GATE=gate or "", num_warps=cut.warps, **launch_options(device),
    )  # fmt: skip
    return y_TO, s_TI


def _aot(cut: Cut, gate: str) -> AotKernel:
    names = ("x", "residual", "norm", "bias", "y", "s")
    types = {f"{name}_ptr": "*bf16" for name in names}
    types |= {"code_ptr": "*i16", "scale_ptr": "*fp16", "zero_ptr": "*u8", "outer_ptr": "*fp16"}
    types |= {"outer_minimum_ptr": "*fp16", "factor_ptr": "*fp32", "x_stride": "i32:16", "tokens": "i32"}
    types |= {"outputs": "i32:16", "eps": "fp32"}
    constants = _constants(cut, W4, 4096, torch.bfloat16) | {"FACTOR": False, "BIAS": False, "GATE": gate}
    fused = {"NORM": cut.solo, "RESIDUAL": cut.solo}
    return AotKernel(
        fragments_kernel, {name: types[name] for name in fragments_kernel.arg_names if name in types},
        constants | fused, num_warps=cut.warps, hot=not cut.solo, tensor_cores="MMA", archs=("sm_80", "sm_90"),
    )  # fmt: skip


AOT = (
    _aot(Cut(many=1, tokens=8, depth=2, warps=2, solo=True), "silu"),
    _aot(Cut(many=1, tokens=8, depth=8, warps=4), ""),
)
