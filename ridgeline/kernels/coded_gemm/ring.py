"""Linear maps of weights in fragments for one to sixteen tokens on Hopper, at the memory's rate: few instructions a
code, and codes on their way while the kernel before still works.

It differs from fragments_kernel.py, whose products it shares, in what limited that one on an H200:

* Instructions. A code that is masked in place is already a bfloat16: bits 0 to 7 of a bfloat16 count in steps of
  2**-133, whether the number is subnormal or not. So eight codes of 4 bits take a shift and four masks, and no addition
  takes the zero away. x is multiplied with 2**100 (and less for codes that stand 4 bits higher), and products of a
  matrix of ones with x, which all tiles share, give the sum of x that the zeros multiply.
* Latency. Programs stay: they take tiles in turn, and ask for codes DEPTH steps ahead, across tiles. These lie in
  shared memory, of which a program takes so little that the programs of two kernels are on a processor at once. Codes
  of the next kernel then arrive while the last sums of this one are added up.

Legend:
    W  warps
    R  rows of all tiles of a part
    P  places of a slice, 16
    T  tokens
    U  inputs of a unit
    G  groups of a unit
"""

# mypy: disable-error-code="assignment, unreachable, misc, attr-defined, var-annotated"
# ruff: noqa: RUF005 - Gluon knows no starred tuples
from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ridgeline.core.weight_format import CodedFormat
from ridgeline.kernels.activation.triton import gated
from ridgeline.kernels.aot import AotKernel
from ridgeline.kernels.coded_gemm.choose import Ring
from ridgeline.kernels.coded_gemm.fragments import TILE, Fragments, span, unit
from ridgeline.kernels.coded_gemm.fragments_asm import Bare, bare, operands
from ridgeline.kernels.coded_gemm.fragments_kernel import (
    _each,
    _groups,
    _number,
    _scales,
    _slices,
    _split,
    _tokens,
    _words,
    _zeros,
)
from ridgeline.kernels.coded_gemm.op import Q4_K, W4
from ridgeline.kernels.gluon_names import load_rows
from ridgeline.kernels.launch import launch_options, num_multiprocessors


@gluon.constexpr_function
def _odd(i, bits):
    """Return True if slice i of a unit has its codes 4 bits higher than slice 0 has them."""
    return bits == 4 and i % 2 == 1


@gluon.constexpr_function
def _by(i, bits, even, odd):
    """Return what slice i of x is multiplied with."""
    return odd if _odd(i, bits) else even


@gluon.jit
def _next(tile, step, STEPS: gl.constexpr):
    """Return the tile and the step behind these."""
    return tile + gl.where(step == STEPS - 1, gl.num_programs(0), 0), gl.where(step == STEPS - 1, 0, step + 1)


@gluon.jit
def _ask(
    slot, from_, tile, step, more, others, UNITS: gl.constexpr, WORDS: gl.constexpr, MANY: gl.constexpr,
    WARPS: gl.constexpr, EACH: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Copy the codes of a step to a slot of the ring: EACH units of each warp, of MANY tiles of each part.

    others: how many tiles lie between those of one part and those of the other.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    slot_W = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    row = gl.arange(0, EACH * PARTS * MANY, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    unit = gl.minimum((step * EACH + row // (MANY * PARTS)) * WARPS + slot_W, UNITS - 1)
    tiles = row % MANY + row // MANY % PARTS * others
    base = from_[0] + tile.to(gl.int64) * (MANY * UNITS * WORDS)
    load_rows(slot, base + (tiles * (UNITS * WORDS) + unit * WORDS + word), mask=(slot_W >= 0) & more)
    async_copy.commit_group()


@gluon.jit
def _parted(slot, WORDS: gl.constexpr, MANY: gl.constexpr, WARPS: gl.constexpr, COUNT: gl.constexpr):
    """Return what lies in a slot: for each unit of a warp and each part [W, many, words]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    return _split(slot.load(layout).reshape([WARPS, COUNT, MANY, WORDS]).permute([0, 2, 3, 1]), COUNT)


@gluon.jit
def _numbers_of(
    from_, tile, step, more, UNIT: gl.constexpr, UNITS: gl.constexpr, GROUP: gl.constexpr, MANY: gl.constexpr,
    WARPS: gl.constexpr, EACH: gl.constexpr, ZEROS: gl.constexpr, NESTED: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Ask for the numbers of a step: for each unit and part scales, zeros or minima, outer scales, outer minima. Scales
    stand for what there is not. Past the last step those of the first tile are loaded, which is there."""
    found = ()
    row = gl.where(more, tile, 0).to(gl.int64) * (MANY * 16)
    at, outer_at = row * (UNITS * UNIT // GROUP), row * (UNITS * UNIT // 256)
    for e in gl.static_range(EACH):
        for p in gl.static_range(PARTS):
            unit = (step * EACH + e) * WARPS
            scale = _scales(from_[p][1] + at, unit, UNIT, UNITS, GROUP, MANY, WARPS)
            zero, outer, outer_minimum = scale, scale, scale
            if ZEROS == "levels" or ZEROS == "minimum":
                zero = _scales(from_[p][2] + at, unit, UNIT, UNITS, GROUP, MANY, WARPS)
            if NESTED:
                outer = _scales(from_[p][3] + outer_at, unit, UNIT, UNITS, 256, MANY, WARPS)
                if ZEROS == "minimum":
                    outer_minimum = _scales(from_[p][4] + outer_at, unit, UNIT, UNITS, 256, MANY, WARPS)
            found = found + ((scale, zero, outer, outer_minimum),)
    return found


@gluon.jit
def _products(
    acc, words, slots, x, UNIT: gl.constexpr, SPAN: gl.constexpr, GROUP: gl.constexpr, MANY: gl.constexpr,
    BITS: gl.constexpr, ASM: gl.constexpr, ZEROS: gl.constexpr, NESTED: gl.constexpr, BASE: gl.constexpr,
    ONE: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr, sums: gl.constexpr,
    left: gl.constexpr,
):  # fmt: skip
    """Return the parts' sums with the products of a unit of each warp added.

    words: the codes of each part, as left operands.
    x: the slices.
    ONE: the bits of the number that the code 1 becomes, and of that 4 bits higher.
    """
    row: gl.constexpr = gl.SliceLayout(2, sums)
    ROWS: gl.constexpr = MANY * 16
    COUNT: gl.constexpr = _groups(UNIT, GROUP)
    SLICES: gl.constexpr = UNIT // 16 // COUNT
    for group in gl.static_range(COUNT):
        part = _zeros(PARTS, WARPS, ROWS, TOKENS, sums)
        total = gl.zeros([WARPS, 16, TOKENS], gl.float32, sums)
        for i in gl.static_range(group * SLICES, group * SLICES + SLICES):
            grown = ()
            for p in gl.static_range(PARTS):
                w_WRP = operands(words[p], (), 0, i, BITS, 0, ASM, "middle", x[i])
                grown = grown + (mma_v2(w_WRP, x[i], part[p]),)
            part = grown
            if ZEROS != "none":
                one = gl.full([WARPS, 16, 16], ONE[1] if _odd(i, BITS) else ONE[0], gl.int16, left)
                total = mma_v2(one.to(x[i].dtype, bitcast=True), x[i], total)
        grown = ()
        for p in gl.static_range(PARTS):
            scale = _number(_each(slots[p][0], row)[group])
            if NESTED:
                scale *= _each(slots[p][2], row)[0].to(gl.float32)
            y = acc[p] + part[p] * scale[:, :, None]
            if ZEROS == "middle":
                y -= _tiled(total, MANY, sums) * (scale * (2.0 ** (BITS - 1) - BASE))[:, :, None]
            elif ZEROS == "levels":
                zero = _each(slots[p][1], row)[group].to(gl.float32)
                y -= _tiled(total, MANY, sums) * (scale * (zero - BASE))[:, :, None]
            elif ZEROS == "minimum":
                minimum = _number(_each(slots[p][1], row)[group])
                if NESTED:
                    minimum *= _each(slots[p][3], row)[0].to(gl.float32)
                y -= _tiled(total, MANY, sums) * (minimum - scale * BASE)[:, :, None]
            grown = grown + (y,)
        acc = grown
    return acc


@gluon.jit
def _tiled(total, MANY: gl.constexpr, sums: gl.constexpr):
    """Return the sums of x, which are the same for all rows, for all tiles."""
    if MANY == 1:
        return total
    else:
        both = gl.join(total, total).permute([0, 3, 1, 2]).reshape([total.shape[0], 2 * total.shape[1], total.shape[2]])
        return gl.convert_layout(_tiled(both, MANY // 2, sums), sums, assert_trivial=True)


@gluon.jit
def _power(u, SPAN: gl.constexpr, BITS: gl.constexpr, EVEN: gl.constexpr, ODD: gl.constexpr):
    """Return what the inputs `u` of a unit are multiplied with."""
    slice = u // SPAN * (SPAN // 16) + u % (SPAN // 4) // 4
    return gl.where((slice % 2 == 1) & (BITS == 4), ODD, EVEN)


@gluon.jit
def _held(
    x_ptr, residual_ptr, norm_ptr, s_ptr, x_stride, tokens, writes, eps,
    UNIT: gl.constexpr, STEPS: gl.constexpr, WARPS: gl.constexpr, TOKENS: gl.constexpr, inputs: gl.constexpr,
    SPAN: gl.constexpr, BITS: gl.constexpr, EVEN: gl.constexpr, ODD: gl.constexpr,
    NORM: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Put x into shared memory, times the norm's weight and the powers of two that codes need: [steps, W, T, U].

    Return it with the norm's factor. With a norm or a residual there is one token.
    """
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8 if TOKENS > 1 else 1, [2, 1, 0])
    layout: gl.constexpr = gl.BlockedLayout([1, 1, UNIT // 32], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    held = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STEPS, WARPS, TOKENS, UNIT], shared)
    slot_W = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    token_T = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    place_U = gl.arange(0, UNIT, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    first = slot_W[:, None, None] * UNIT + place_U[None, None, :]
    power = _power(place_U, SPAN, BITS, EVEN, ODD)[None, None, :]
    n = ()
    if NORM:
        for step in gl.static_range(STEPS):
            at = first + step * (WARPS * UNIT)
            n = n + (gl.load(norm_ptr + at, mask=at < inputs, other=0),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = ()
    there = (token_T < tokens)[None, :, None]
    for step in gl.static_range(STEPS):
        at = first + step * (WARPS * UNIT) + (token_T * x_stride)[None, :, None]
        kept = (first + step * (WARPS * UNIT) < inputs) & there
        s = gl.load(x_ptr + at, mask=kept, other=0)
        if RESIDUAL:
            s = (s.to(gl.float32) + gl.load(residual_ptr + at, mask=kept, other=0).to(gl.float32)).to(s.dtype)
        x = x + (s,)
    squares = gl.zeros([WARPS, TOKENS, UNIT], gl.float32, layout)
    for step in gl.static_range(STEPS):
        s = x[step]
        at = first + step * (WARPS * UNIT)
        if RESIDUAL:
            gl.store(s_ptr + at, s, mask=(at < inputs) & writes)
        number = s.to(gl.float32)
        if NORM:
            squares += number * number
            number = (number * n[step].to(gl.float32)).to(s.dtype).to(gl.float32)
        held.index(step).store((number * power).to(s.dtype))
    factor = 1.0
    if NORM:
        factor = gl.rsqrt(gl.sum(gl.sum(gl.sum(squares, 2), 1), 0) / inputs + eps)
    return held, factor


@gluon.jit
def _powered(x, BITS: gl.constexpr, EVEN: gl.constexpr, ODD: gl.constexpr, COUNT: gl.constexpr):
    """Return the slices of x times the powers of two that codes need."""
    found = ()
    for i in gl.static_range(COUNT):
        found = found + ((x[i].to(gl.float32) * _by(i, BITS, EVEN, ODD)).to(x[i].dtype),)
    return found


@gluon.jit
def _finish(
    acc, bias_ptr, y_ptr, factor, tile, tokens, outputs, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    BIAS: gl.constexpr, GATE: gl.constexpr, sums: gl.constexpr,
):  # fmt: skip
    """Add up the warps' sums and write the tile's outputs."""
    layout: gl.constexpr = gl.SliceLayout(0, sums)
    row_R = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    token_T = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
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


@gluon.jit(do_not_specialize=["tokens"])
def ring_kernel(
    x_ptr, residual_ptr, norm_ptr, code_ptr, scale_ptr, zero_ptr, outer_ptr, outer_minimum_ptr, factor_ptr, bias_ptr,
    y_ptr, s_ptr, x_stride, tokens, outputs, eps,
    inputs: gl.constexpr, BITS: gl.constexpr, ASM: gl.constexpr, ZEROS: gl.constexpr, NESTED: gl.constexpr,
    BASE: gl.constexpr, ONE: gl.constexpr, EVEN: gl.constexpr, ODD: gl.constexpr, POWER: gl.constexpr,
    GROUP: gl.constexpr, UNIT: gl.constexpr, SPAN: gl.constexpr, MANY: gl.constexpr, TOKENS: gl.constexpr,
    DEPTH: gl.constexpr, EACH: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr,
    HELD: gl.constexpr,  # x is in shared memory, else it is loaded for each unit
    SOLO: gl.constexpr,  # there is one token, and it is held
    NORM: gl.constexpr, RESIDUAL: gl.constexpr, FACTOR: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Compute y [T, O], and s [T, I] with a residual. There are at most TOKENS tokens.

    code: int16.
    DEPTH: steps whose codes are asked for ahead; AHEAD: steps whose scales are.
    EVEN, ODD, POWER: see `Bare`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    PARTS: gl.constexpr = 1 if GATE == "" else 2
    UNITS: gl.constexpr = inputs // UNIT
    STEPS: gl.constexpr = (UNITS + WARPS * EACH - 1) // (WARPS * EACH)
    ROWS: gl.constexpr = MANY * 16
    WORDS: gl.constexpr = UNIT * BITS
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    tokenwise: gl.constexpr = gl.BlockedLayout([1, 1, SPAN // 4], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])

    tiles = outputs // ROWS
    programs = gl.num_programs(0)
    ring = gl.allocate_shared_memory(gl.int16, [DEPTH, WARPS, EACH * PARTS * MANY, WORDS], plain)
    from_ = ()
    for p in gl.static_range(PARTS):
        first = p * (outputs // 16).to(gl.int64)
        at, outer = first * (inputs // GROUP * 16), first * (inputs // 256 * 16)
        others = (scale_ptr + at, zero_ptr + at, outer_ptr + outer, outer_minimum_ptr + outer)
        from_ = from_ + ((code_ptr + first * (UNITS * WORDS), others[0], others[1], others[2], others[3]),)
    ask, get, slots = (gl.program_id(0), 0), (gl.program_id(0), 0), ()
    for slot in gl.static_range(DEPTH):
        _ask(
            ring.index(slot), from_[0], ask[0], ask[1], ask[0] < tiles, outputs // 16, UNITS, WORDS, MANY, WARPS,
            EACH, PARTS,
        )  # fmt: skip
        ask = _next(ask[0], ask[1], STEPS)
    for _ahead in gl.static_range(AHEAD):
        fresh = _numbers_of(
            from_, get[0], get[1], get[0] < tiles, UNIT, UNITS, GROUP, MANY, WARPS, EACH, ZEROS, NESTED, PARTS
        )
        slots = slots + (fresh,)
        get = _next(get[0], get[1], STEPS)

    held, factor = 0, 1.0
    if HELD:
        held, factor = _held(
            x_ptr, residual_ptr, norm_ptr, s_ptr, x_stride, tokens, gl.program_id(0) == 0, eps,
            UNIT, STEPS * EACH, WARPS, 1 if SOLO else TOKENS, inputs, SPAN, BITS, EVEN, ODD, NORM, RESIDUAL, PDL,
        )  # fmt: skip
    elif PDL:
        tl.extra.cuda.gdc_wait()
    factor *= POWER
    if FACTOR:
        factor *= gl.load(factor_ptr)

    source = (x_ptr, x_stride, tokens)
    early = ()
    if not HELD:
        for e in gl.static_range(EACH):
            early = early + (_tokens(source, e * WARPS, 0, TOKENS, UNIT, UNIT, UNITS, WARPS, tokenwise),)
    slot = 0
    for tile in range(gl.program_id(0), tiles, programs):
        acc = _zeros(PARTS, WARPS, ROWS, TOKENS, sums)
        for step in range(STEPS):
            async_copy.wait_group(DEPTH - 1)
            words = _parted(ring.index(slot), WORDS, MANY, WARPS, EACH * PARTS)
            _ask(
                ring.index(slot), from_[0], ask[0], ask[1], ask[0] < tiles, outputs // 16, UNITS, WORDS, MANY,
                WARPS, EACH, PARTS,
            )  # fmt: skip
            later = ()
            for i in gl.static_range(AHEAD - 1):
                later = later + (slots[i + 1],)
            fresh = _numbers_of(
                from_, get[0], get[1], get[0] < tiles, UNIT, UNITS, GROUP, MANY, WARPS, EACH, ZEROS, NESTED, PARTS
            )
            coming = ()
            for e in gl.static_range(EACH):
                if HELD:
                    x_WTU = held.index(step * EACH + e).load(tokenwise)
                    if SOLO:
                        columns = gl.zeros([WARPS, TOKENS, UNIT], x_ptr.dtype.element_ty, tokenwise)  # for their shape
                        x_WTU, columns = gl.broadcast(x_WTU, columns)
                    x = _slices(x_WTU, SPAN, right)
                else:
                    x = _powered(_slices(early[e], SPAN, right), BITS, EVEN, ODD, UNIT // 16)
                    next = gl.where(step == STEPS - 1, 0, step + 1) * EACH + e
                    coming = coming + (_tokens(source, next * WARPS, 0, TOKENS, UNIT, UNIT, UNITS, WARPS, tokenwise),)
                here, numbers = (), ()
                for p in gl.static_range(PARTS):
                    here = here + (_words(words[e * PARTS + p], left),)
                    numbers = numbers + (slots[0][e * PARTS + p],)
                acc = _products(
                    acc, here, numbers, x, UNIT, SPAN, GROUP, MANY, BITS, ASM, ZEROS, NESTED, BASE, ONE, TOKENS,
                    WARPS, PARTS, sums, left,
                )  # fmt: skip
            early = coming
            slots = later + (fresh,)
            slot = gl.where(slot == DEPTH - 1, 0, slot + 1)
            ask = _next(ask[0], ask[1], STEPS)
            get = _next(get[0], get[1], STEPS)
        _finish(acc, bias_ptr, y_ptr, factor, tile, tokens, outputs, ROWS, TOKENS, BIAS, GATE, sums)


def _constants(cut: Ring, how: CodedFormat, inputs: int) -> dict[str, Any]:
    """Return the kernel's constants that follow from a cut and a format."""
    form: Bare = bare(how)
    zeros = how.zeros if how.values == "levels" else "none"
    if zeros == "middle" and form.base:
        zeros = "none"  # it is already taken
    return {
        "inputs": inputs, "BITS": how.bits, "ASM": form.asm, "ZEROS": zeros, "BASE": form.base, "NESTED": how.nested,
        "ONE": form.one, "EVEN": form.even, "ODD": form.odd, "POWER": form.power, "GROUP": how.group or inputs,
        "UNIT": unit(how), "SPAN": span(how), "MANY": cut.many, "TOKENS": cut.tokens, "DEPTH": cut.depth,
        "EACH": cut.each, "WARPS": cut.warps, "AHEAD": cut.ahead, "HELD": cut.held, "SOLO": cut.solo,
    }  # fmt: skip


def launch(
    cut: Ring,
    x_TI: Tensor,
    residual_TI: Tensor | None,
    norm_weight_I: Tensor | None,
    eps: float,
    weight: Fragments,
    bias_O: Tensor | None,
    gate: str | None,
) -> tuple[Tensor, Tensor]:
    """Return (y, s) as `coded_norm_linear` does. Without `norm_weight_I` there is no norm, and s is x; only a solo cut
    has a norm. x's columns are in the order of the weight's."""
    (tokens, inputs), how, device = x_TI.shape, weight.format, x_TI.device
    outputs = weight.code_OB.shape[0] // (2 if gate else 1)
    y_TO = torch.empty(tokens, outputs, dtype=x_TI.dtype, device=device)
    s_TI = x_TI if residual_TI is None else torch.empty(tokens, inputs, dtype=x_TI.dtype, device=device)

    def some(x: Tensor | None) -> Tensor:
        """Return x, or any pointer in place of an absent tensor: the kernel reads only what its flags say."""
        return x_TI if x is None else x

    programs = min(outputs // (TILE * cut.many), cut.programs * num_multiprocessors(device))
    ring_kernel[(programs,)](
        x_TI, some(residual_TI), some(norm_weight_I), weight.code_OB.view(torch.int16), weight.scale_OG,
        some(weight.zero_OG), some(weight.outer_OS), some(weight.outer_minimum_OS), some(weight.scale), some(bias_O),
        y_TO, s_TI, x_TI.stride(0), tokens, outputs, eps, **_constants(cut, how, inputs),
        NORM=norm_weight_I is not None, RESIDUAL=residual_TI is not None, FACTOR=weight.scale is not None,
        BIAS=bias_O is not None, GATE=gate or "", num_warps=cut.warps, **launch_options(device),
    )  # fmt: skip
    return y_TO, s_TI


def _aot(cut: Ring, gate: str, how: CodedFormat = W4, scale: str = "*fp16") -> AotKernel:
    names = ("x", "residual", "norm", "bias", "y", "s")
    types = {f"{name}_ptr": "*bf16" for name in names}
    types |= {"code_ptr": "*i16", "scale_ptr": scale, "zero_ptr": scale, "outer_ptr": "*fp16"}
    types |= {"outer_minimum_ptr": "*fp16", "factor_ptr": "*fp32"}
    types |= {"x_stride": "i32:16", "tokens": "i32", "outputs": "i32:16", "eps": "fp32"}
    constants = _constants(cut, how, 4096) | {"FACTOR": False, "BIAS": False, "GATE": gate}
    return AotKernel(
        ring_kernel, {name: types[name] for name in ring_kernel.arg_names if name in types},
        constants | {"NORM": cut.solo, "RESIDUAL": cut.solo}, num_warps=cut.warps, hot=True, tensor_cores="MMA",
        archs=("sm_90",),
    )  # fmt: skip


AOT = (
    _aot(Ring(many=1, tokens=8, depth=5, each=1, warps=4, programs=2, held=True, solo=True, ahead=6), "silu"),
    _aot(Ring(many=2, tokens=8, depth=6, each=1, warps=4, programs=2, ahead=6), ""),
    _aot(Ring(many=1, tokens=8, depth=8, each=1, warps=4, programs=2, held=True, solo=True, ahead=4), "", Q4_K, "*i8"),
)
