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
    U  inputs of a unit
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ridgeline.kernels.activation.triton import gated
from ridgeline.kernels.coded_gemm.fragments_asm import operands, subtracted


@gluon.constexpr_function
def _groups(unit, group):
    """Return how many scales of a row a unit has."""
    return max(1, unit // group)


@gluon.jit
def _split(x, COUNT: gl.constexpr):
    """Return a tuple of the COUNT tensors that lie side by side in the last axis of `x` [W, A, B, COUNT]."""
    if COUNT == 1:
        return (x.reshape([x.shape[0], x.shape[1], x.shape[2]]),)
    else:
        first, second = gl.split(
            x.reshape([x.shape[0], x.shape[1], x.shape[2], 2, COUNT // 2]).permute([0, 1, 2, 4, 3])
        )
        return _split(first, COUNT // 2) + _split(second, COUNT // 2)


@gluon.jit
def _words(raw, operand: gl.constexpr):
    """Return the words of the matrix units' left operand: a tuple of [W, R, P]. raw: [W, many, 256 · tiles]."""
    W: gl.constexpr = raw.shape[0]
    MANY: gl.constexpr = raw.shape[1]
    COUNT: gl.constexpr = raw.shape[2] // 256
    x = raw.reshape([W, MANY, COUNT, 8, 4, 2, 2, 2]).permute([0, 1, 6, 3, 5, 4, 7, 2])
    out = ()
    parts = _split(x.reshape([W, MANY * 16, 16, COUNT]), COUNT)
    for i in gl.static_range(COUNT):
        out = out + (gl.convert_layout(parts[i], operand, assert_trivial=True),)  # type: ignore[assignment]  # noqa: RUF005
    return out


@gluon.jit
def _slices(x_WTU, SPAN: gl.constexpr, operand: gl.constexpr):
    """Return the slices of a unit of x as right operands: a tuple of [W, P, T]."""
    W: gl.constexpr = x_WTU.shape[0]
    T: gl.constexpr = x_WTU.shape[1]
    COUNT: gl.constexpr = x_WTU.shape[2] // 16
    x = x_WTU.reshape([W, T, COUNT // (SPAN // 16), 4, SPAN // 16, 2, 2]).permute([0, 5, 3, 6, 1, 2, 4])
    out = ()
    parts = _split(x.reshape([W, 16, T, COUNT]), COUNT)
    for i in gl.static_range(COUNT):
        out = out + (gl.convert_layout(parts[i], operand, assert_trivial=True),)  # type: ignore[assignment]  # noqa: RUF005
    return out


@gluon.jit
def _number(value):
    """Return scales in float32. Bytes are exponents of two (E8M0), except in nested formats, whose int8 are levels."""
    if value.dtype == gl.uint8:
        bits = gl.where(value == 0, 0x400000, value.to(gl.int32) << 23)
        return bits.to(gl.float32, bitcast=True)
    else:
        return value.to(gl.float32)


@gluon.jit
def _fetch(
    codes, scales, minima, outers, outer_minima, unit,
    UNIT: gl.constexpr, UNITS: gl.constexpr, GROUP: gl.constexpr, MANY: gl.constexpr, WARPS: gl.constexpr,
    LOW: gl.constexpr, HIGH: gl.constexpr, ZEROS: gl.constexpr, NESTED: gl.constexpr,
    sums: gl.constexpr, operand: gl.constexpr,
):  # fmt: skip
    """Ask for what the warps need of their units, of one part: (planes, scales, zeros or minima, outer scales)."""
    WORDS: gl.constexpr = UNIT * (LOW + HIGH)
    planes = ()
    for high in gl.static_range(2 if HIGH else 1):
        SIZE: gl.constexpr = UNIT * (HIGH if high else LOW)
        layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
        slot_W = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
        tile_M = gl.arange(0, MANY, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
        word_S = gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
        unit_W11 = gl.minimum(unit + slot_W, UNITS - 1)[:, None, None]
        at = unit_W11 * WORDS + tile_M[None, :, None] * (UNITS * WORDS) + word_S[None, None, :]
        if high:
            at += UNIT * LOW
        planes = planes + (gl.load(codes + at, eviction_policy="evict_first"),)  # type: ignore[assignment]  # noqa: RUF005

    scale, zero, outer = (), (), ()
    for group in gl.static_range(_groups(UNIT, GROUP)):
        at_WR = _places(unit, group, UNIT, UNITS, GROUP, MANY, WARPS, gl.SliceLayout(2, sums))
        scale = scale + (gl.load(scales + at_WR),)  # type: ignore[assignment]  # noqa: RUF005
        if ZEROS == "levels":
            at_WR = _places(unit, group, UNIT, UNITS, GROUP, MANY, WARPS, gl.SliceLayout(2, operand))
            zero = zero + (gl.load(minima + at_WR),)  # type: ignore[assignment]  # noqa: RUF005
        elif ZEROS == "minimum":
            zero = zero + (gl.load(minima + at_WR),)  # type: ignore[assignment]  # noqa: RUF005
    if NESTED:
        at_WR = _places(unit, 0, UNIT, UNITS, 256, MANY, WARPS, gl.SliceLayout(2, sums))
        outer = (gl.load(outers + at_WR),)
        if ZEROS == "minimum":
            outer = outer + (gl.load(outer_minima + at_WR),)  # type: ignore[assignment]  # noqa: RUF005
    return planes, scale, zero, outer


@gluon.jit
def _places(
    unit, group: gl.constexpr, UNIT: gl.constexpr, UNITS: gl.constexpr, GROUP: gl.constexpr, MANY: gl.constexpr,
    WARPS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Return where the scales of the warps' units are: [W, R]."""
    GROUPS: gl.constexpr = UNITS * UNIT // GROUP
    row_R = gl.arange(0, MANY * 16, gl.SliceLayout(0, layout))
    unit_W = gl.minimum(unit + gl.arange(0, WARPS, gl.SliceLayout(1, layout)), UNITS - 1)
    if GROUP >= UNIT:
        group_W = unit_W // (GROUP // UNIT)
    else:
        group_W = unit_W * (UNIT // GROUP) + group
    return group_W[:, None] * 16 + (row_R % 16 + row_R // 16 * (GROUPS * 16))[None, :]


@gluon.jit
def _multiplied(
    acc_WRT, slot, x_slices, UNIT: gl.constexpr, GROUP: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr,
    ASM: gl.constexpr, ZEROS: gl.constexpr, NESTED: gl.constexpr, operand: gl.constexpr,
):  # fmt: skip
    """Return the sums with a unit's products added."""
    planes, scales, zeros, outers = slot
    dtype: gl.constexpr = x_slices[0].dtype
    GROUPS: gl.constexpr = _groups(UNIT, GROUP)
    SLICES: gl.constexpr = UNIT // 16 // GROUPS  # of a group
    low = _words(planes[0], operand)
    high = _words(planes[1], operand) if HIGH else ()
    ones = gl.full([acc_WRT.shape[0], acc_WRT.shape[1], 16], 1.0, dtype, operand)
    for group in gl.static_range(GROUPS):
        part_WRT = gl.zeros_like(acc_WRT)
        total_WRT = gl.zeros_like(acc_WRT)
        zero = subtracted(zeros[group], LOW + HIGH, dtype) if ZEROS == "levels" else 0
        for i in gl.static_range(group * SLICES, group * SLICES + SLICES):
            x_WPT = x_slices[i]
            w_WRP = operands(low, high, zero, i, LOW, HIGH, ASM, ZEROS, x_WPT)
            part_WRT = mma_v2(w_WRP, x_WPT, part_WRT)
            if ZEROS == "minimum":
                total_WRT = mma_v2(ones, x_WPT, total_WRT)
        scale_WR = _number(scales[group])
        if NESTED:
            scale_WR *= outers[0].to(gl.float32)
        acc_WRT += part_WRT * scale_WR[:, :, None]
        if ZEROS == "minimum":
            minimum_WR = _number(zeros[group])
            if NESTED:
                minimum_WR *= outers[1].to(gl.float32)
            acc_WRT -= total_WRT * minimum_WR[:, :, None]
    return acc_WRT


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
    input_W1U = (
        gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None] * UNIT
        + gl.arange(0, UNIT, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    )
    n = ()
    if NORM:
        for step in gl.static_range(STEPS):
            at = input_W1U + step * (WARPS * UNIT)
            n = n + (gl.load(norm_ptr + at, mask=at < inputs, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = ()
    for step in gl.static_range(STEPS):
        at = input_W1U + step * (WARPS * UNIT)
        s = gl.load(x_ptr + at, mask=at < inputs, other=0)
        if RESIDUAL:
            s = (s.to(gl.float32) + gl.load(residual_ptr + at, mask=at < inputs, other=0).to(gl.float32)).to(s.dtype)
        x = x + (s,)  # type: ignore[assignment]  # noqa: RUF005
    squares = gl.zeros([WARPS, 1, UNIT], gl.float32, layout)
    for step in gl.static_range(STEPS):
        s = x[step]
        at = input_W1U + step * (WARPS * UNIT)
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
    NORM: gl.constexpr, RESIDUAL: gl.constexpr, FACTOR: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Compute y [T, O], and s [T, I] with a residual.

    code: int16. LOW, HIGH: bits of the planes; HIGH is 0 if there is only one.
    factor: the factor of the whole weight.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    PARTS: gl.constexpr = 1 if GATE == "" else 2
    UNITS: gl.constexpr = inputs // UNIT
    STEPS: gl.constexpr = (UNITS + WARPS - 1) // WARPS
    AHEAD: gl.constexpr = DEPTH if DEPTH < STEPS else STEPS
    CHUNKS: gl.constexpr = (STEPS + AHEAD - 1) // AHEAD
    ROWS: gl.constexpr = MANY * 16
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    tokenwise: gl.constexpr = gl.BlockedLayout([1, 1, SPAN // 4], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])

    codes, scales, minima, outers, outer_minima = (), (), (), (), ()
    for part in gl.static_range(PARTS):
        tile = (gl.program_id(0) * MANY + part * (outputs // 16)).to(gl.int64)
        group_at = tile * (inputs // GROUP * 16)
        outer_at = tile * (inputs // 256 * 16)
        codes = codes + (code_ptr + tile * (UNITS * UNIT * (LOW + HIGH)),)  # type: ignore[assignment]  # noqa: RUF005
        scales = scales + (scale_ptr + group_at,)  # type: ignore[assignment]  # noqa: RUF005
        minima = minima + (zero_ptr + group_at,)  # type: ignore[assignment]  # noqa: RUF005
        outers = outers + (outer_ptr + outer_at,)  # type: ignore[assignment]  # noqa: RUF005
        outer_minima = outer_minima + (outer_minimum_ptr + outer_at,)  # type: ignore[assignment]  # noqa: RUF005

    slots = ()
    acc = ()
    for step in gl.static_range(AHEAD):
        slot = ()
        for part in gl.static_range(PARTS):
            slot = slot + (  # type: ignore[assignment]  # noqa: RUF005
                _fetch(
                    codes[part], scales[part], minima[part], outers[part], outer_minima[part], step * WARPS,
                    UNIT, UNITS, GROUP, MANY, WARPS, LOW, HIGH, ZEROS, NESTED, sums, left,
                ),
            )  # fmt: skip
        slots = slots + (slot,)  # type: ignore[assignment]  # noqa: RUF005
    for part in gl.static_range(PARTS):
        acc = acc + (gl.zeros([WARPS, ROWS, TOKENS], gl.float32, sums),)  # type: ignore[assignment]  # noqa: RUF005

    factor = 1.0
    if SOLO:
        held, factor = _prepared(
            x_ptr, residual_ptr, norm_ptr, s_ptr, gl.program_id(0) == 0, eps,
            UNIT, STEPS, WARPS, inputs, NORM, RESIDUAL, PDL,
        )  # fmt: skip
    else:
        held = 0
        if PDL:
            tl.extra.cuda.gdc_wait()

    first_token = gl.program_id(1) * TOKENS
    for chunk in range(CHUNKS - 1):
        acc, slots = _chunk(
            acc, slots, codes, scales, minima, outers, outer_minima, held, x_ptr, x_stride, first_token, tokens, chunk,
            inputs, UNIT, SPAN, GROUP, MANY, TOKENS, WARPS, LOW, HIGH, ASM, ZEROS, NESTED, SOLO,
            True, AHEAD, PARTS, left, right, tokenwise,
        )  # fmt: skip
    acc, slots = _chunk(
        acc, slots, codes, scales, minima, outers, outer_minima, held, x_ptr, x_stride, first_token, tokens, CHUNKS - 1,
        inputs, UNIT, SPAN, GROUP, MANY, TOKENS, WARPS, LOW, HIGH, ASM, ZEROS, NESTED, SOLO,
        False, AHEAD, PARTS, left, right, tokenwise,
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


@gluon.jit
def _tokens(
    x_ptr, x_stride, first_token, tokens, unit,
    TOKENS: gl.constexpr, UNIT: gl.constexpr, UNITS: gl.constexpr, WARPS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Load the warps' units of x: [W, T, U], with zeros past the last token and the last unit."""
    unit_W = unit + gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    token_T = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    input_U = gl.arange(0, UNIT, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    at = token_T[None, :, None] * x_stride + (unit_W * UNIT)[:, None, None] + input_U[None, None, :]
    kept = (token_T < tokens)[None, :, None] & (unit_W < UNITS)[:, None, None] & (input_U >= 0)[None, None, :]
    return gl.load(x_ptr + at, mask=kept, other=0)


@gluon.jit
def _chunk(
    acc, slots, codes, scales, minima, outers, outer_minima, held, x_ptr, x_stride, first_token, tokens, chunk,
    inputs: gl.constexpr, UNIT: gl.constexpr, SPAN: gl.constexpr, GROUP: gl.constexpr, MANY: gl.constexpr,
    TOKENS: gl.constexpr, WARPS: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, ASM: gl.constexpr,
    ZEROS: gl.constexpr, NESTED: gl.constexpr, SOLO: gl.constexpr, MORE: gl.constexpr, AHEAD: gl.constexpr,
    PARTS: gl.constexpr, left: gl.constexpr, right: gl.constexpr, tokenwise: gl.constexpr,
):  # fmt: skip
    """Multiply AHEAD units of each warp, and ask for the next ones if there are MORE."""
    UNITS: gl.constexpr = inputs // UNIT
    sums: gl.constexpr = left.parent
    fresh = ()
    for ahead in gl.static_range(AHEAD):
        step = chunk * AHEAD + ahead
        if SOLO:
            columns = gl.zeros([WARPS, TOKENS, UNIT], x_ptr.dtype.element_ty, tokenwise)  # for their shape only
            x_WTU, _ = gl.broadcast(held.index(step).load(tokenwise), columns)
        else:
            x_WTU = _tokens(x_ptr, x_stride, first_token, tokens, step * WARPS, TOKENS, UNIT, UNITS, WARPS, tokenwise)
        x = _slices(x_WTU, SPAN, right)
        grown = ()
        slot = ()
        for part in gl.static_range(PARTS):
            grown = grown + (  # type: ignore[assignment]  # noqa: RUF005
                _multiplied(acc[part], slots[ahead][part], x, UNIT, GROUP, LOW, HIGH, ASM, ZEROS, NESTED, left),
            )
            if MORE:
                slot = slot + (  # type: ignore[assignment]  # noqa: RUF005
                    _fetch(
                        codes[part], scales[part], minima[part], outers[part], outer_minima[part],
                        (step + AHEAD) * WARPS, UNIT, UNITS, GROUP, MANY, WARPS, LOW, HIGH, ZEROS, NESTED,
                        sums, left,
                    ),
                )  # fmt: skip
        acc = grown
        fresh = fresh + (slot,)  # type: ignore[assignment]  # noqa: RUF005
    return acc, fresh
