"""Linear maps of weights in fragments, for dozens to hundreds of tokens on Hopper: codes become the left operands of
warpgroup products in registers, while bulk copies bring x into shared memory.

A fragment of `mma.sync` is also what one warp of a warpgroup holds, so the order of fragments.py serves here as it is.
It gives each thread neighbouring inputs, whereas warpgroups read x from shared memory with its places in order. So a
small kernel first puts the columns of x in the order of places (places.py).

Two warpgroups of a program own MANY · 64 rows each: neighbours, or with a gate the gates and their ups. Each goes its
own way, so one multiplies while the other makes operands. A third partition, one warp, streams x. Weights are asked for
before the kernel before has ended, since they are never written. Products of a group are added up in float32 and then
multiplied with its scale, as in fragments_kernel.py. If tiles are few, SPLIT programs share the inputs of one, as in
gemm/hopper.py.

Legend:
    R  rows of a warpgroup
    P  places of a slice, 16
    T  tokens of a tile
    G  groups of a unit
"""

# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005 - Gluon knows no starred tuples
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ridgeline.kernels.aot import AotKernel
from ridgeline.kernels.coded_gemm.choose import Wide
from ridgeline.kernels.coded_gemm.fragments import Fragments, span, unit
from ridgeline.kernels.coded_gemm.fragments_asm import instructions, operands, subtracted
from ridgeline.kernels.coded_gemm.fragments_kernel import _groups, _number
from ridgeline.kernels.coded_gemm.op import W4
from ridgeline.kernels.coded_gemm.places import in_places
from ridgeline.kernels.gemm.hopper import (
    PANEL,
    _arrivals,
    _descriptor,
    _descriptor_layout,
    _load_tokens,
    _store,
    _together,
    barrier,
)
from ridgeline.kernels.gluon_names import load_rows
from ridgeline.kernels.launch import launch_options

AHEAD = gl.constexpr(4)  # units whose scales are asked for ahead


@gluon.constexpr_function
def _held(many, groups):
    """Return the layout [R, G] in which threads load scales: those of their rows of the sums, groups together."""
    registers = [[0, 1 << i] for i in range(groups.bit_length() - 1)]
    registers += [[8, 0]] + [[64 << i, 0] for i in range(many.bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64 * many, groups])


@gluon.jit
def _split(x, COUNT: gl.constexpr):
    """Return a tuple of the COUNT tensors that lie side by side in the last axis of `x` [A, B, COUNT]."""
    if COUNT == 1:
        return (x.reshape([x.shape[0], x.shape[1]]),)
    else:
        first, second = gl.split(x.reshape([x.shape[0], x.shape[1], 2, COUNT // 2]).permute([0, 1, 3, 2]))
        return _split(first, COUNT // 2) + _split(second, COUNT // 2)


@gluon.jit
def _words(raw, operand: gl.constexpr):
    """Return the words of a plane as left operands: a tuple of [R, P]. raw: [tiles, 256 · tiles of words]."""
    TILES: gl.constexpr = raw.shape[0]
    COUNT: gl.constexpr = raw.shape[1] // 256
    x = raw.reshape([TILES, COUNT, 8, 4, 2, 2, 2]).permute([0, 5, 2, 4, 3, 6, 1])
    parts = _split(x.reshape([TILES * 16, 16, COUNT]), COUNT)
    out = ()
    for i in gl.static_range(COUNT):
        out = out + (gl.convert_layout(parts[i], operand, assert_trivial=True),)
    return out


@gluon.jit
def _each(scale_RG, layout: gl.constexpr):
    """Return the scales of each group: a tuple of [R]."""
    R: gl.constexpr = scale_RG.shape[0]
    COUNT: gl.constexpr = scale_RG.shape[1]
    parts = _split(scale_RG.reshape([R, 1, COUNT]), COUNT)
    out = ()
    for i in gl.static_range(COUNT):
        out = out + (gl.convert_layout(parts[i].reshape([R]), layout, assert_trivial=True),)
    return out


@gluon.jit
def _ring(DEPTH: gl.constexpr, TILES: gl.constexpr, WORDS: gl.constexpr):
    """Return shared memory for a plane of DEPTH units."""
    return gl.allocate_shared_memory(gl.int16, [DEPTH, TILES, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _ask_plane(ring, codes, unit, more, first: gl.constexpr, WORDS: gl.constexpr, UNITS: gl.constexpr):
    """Copy the words of a plane of a unit of each tile to `ring` [tiles, words]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    tile = gl.arange(0, ring.shape[0], gl.SliceLayout(1, layout))
    word = gl.arange(0, ring.shape[1], gl.SliceLayout(0, layout))
    at = (tile * (UNITS * WORDS))[:, None] + (unit * WORDS + first + word)[None, :]
    load_rows(ring, codes + at, mask=((tile >= 0) & more)[:, None])


@gluon.jit
def _ask(
    low, high, codes, slot, unit, more, UNIT: gl.constexpr, UNITS: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr
):
    """Copy a unit's codes to a slot of the rings."""
    _ask_plane(low.index(slot), codes, unit, more, 0, UNIT * (LOW + HIGH), UNITS)
    if HIGH:
        _ask_plane(high.index(slot), codes, unit, more, UNIT * LOW, UNIT * (LOW + HIGH), UNITS)
    async_copy.commit_group()


@gluon.jit
def _scales(pointer, unit, more, UNIT: gl.constexpr, UNITS: gl.constexpr, GROUP: gl.constexpr, MANY: gl.constexpr):
    """Ask for the scales of a unit: [R, G]."""
    COUNT: gl.constexpr = _groups(UNIT, GROUP)
    layout: gl.constexpr = _held(MANY, COUNT)
    row = gl.arange(0, MANY * 64, gl.SliceLayout(1, layout))
    group = gl.arange(0, COUNT, gl.SliceLayout(0, layout))
    if GROUP > UNIT:
        unit = unit // (GROUP // UNIT)
    at_R = row // 16 * (UNITS * UNIT // GROUP * 16) + row % 16 * COUNT
    at = at_R[:, None] + (unit * (16 * COUNT) + group)[None, :]
    return gl.load(pointer + at, mask=((row >= 0) & more)[:, None])


@gluon.jit
def _fetch(
    from_, unit, more, UNIT: gl.constexpr, UNITS: gl.constexpr, GROUP: gl.constexpr, MANY: gl.constexpr,
    ZEROS: gl.constexpr,
):  # fmt: skip
    """Ask for the scales and zeros of a unit. Scales stand for zeros if there are none."""
    scale = _scales(from_[1], unit, more, UNIT, UNITS, GROUP, MANY)
    zero = scale
    if ZEROS == "levels":
        zero = _scales(from_[2], unit, more, UNIT, UNITS, GROUP, MANY)
    return (scale, zero)


@gluon.jit
def _unit(
    acc, low, high, slot, x, stage, UNIT: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr,
    LOW: gl.constexpr, HIGH: gl.constexpr, ASM: gl.constexpr, ZEROS: gl.constexpr,
):  # fmt: skip
    """Return acc [R, T] with the products of a unit added.

    low, high: the words of the planes, as tuples of left operands.
    slot: scales and zeros.
    x: panels of shared memory.
    """
    sums: gl.constexpr = acc.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    row: gl.constexpr = gl.SliceLayout(1, sums)
    COUNT: gl.constexpr = _groups(UNIT, GROUP)
    EACH: gl.constexpr = UNIT // 16 // COUNT  # slices of a group
    scale_RG, zero_RG = slot
    scale = _each(scale_RG, row)
    zero = _each(zero_RG, gl.SliceLayout(1, left) if ZEROS == "levels" else row)
    like = gl.full([1], 0, x.dtype, gl.SliceLayout(0, sums))  # for its type only
    for group in gl.static_range(COUNT):
        part = gl.zeros([acc.shape[0], TOKENS], gl.float32, sums)
        for i in gl.static_range(group * EACH, group * EACH + EACH):
            minus = 0
            if ZEROS == "levels":
                minus = subtracted(zero[group], LOW + HIGH, x.dtype)[:, None]
            w_RP = operands(low, high, minus, i, LOW, HIGH, ASM, ZEROS, like)
            b = x.index(stage * (UNIT // PANEL) + i // 4).slice(i % 4 * 16, 16, 1).permute((1, 0))
            part = warpgroup_mma(w_RP, b, part, use_acc=i > group * EACH, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        acc += part * _number(scale[group])[:, None]
    return acc


@gluon.jit
def _item(token_tiles, SPLIT: gl.constexpr):
    """Return (pair of row tiles, token tile, part) of this program. Programs of one row tile run side by side."""
    item = gl.program_id(0)
    rest = item // token_tiles
    return rest // SPLIT, item % token_tiles, rest % SPLIT


@gluon.jit
def _producer(
    x_desc, x, full, empty, tokens, token_tiles, UNIT: gl.constexpr, UNITS: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Fill the ring with units of x."""
    _, token_tile, part = _item(token_tiles, SPLIT)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for step in range(UNITS // SPLIT):
        here = step % STAGES
        mbarrier.wait(empty.index(here), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(here), TOKENS * UNIT * 2)
        first = (part * (UNITS // SPLIT) + step) * UNIT
        _load_tokens(x_desc, x, full, here, token_tile * TOKENS, first, tokens, UNIT // PANEL)


@gluon.jit
def _consumer(
    x, low, high, full, empty, ups, handed, code_ptr, scale_ptr, zero_ptr, factor_ptr, bias_ptr, y_ptr, sums_ptr,
    arrival_ptr, tokens, token_tiles, outputs,
    WHICH: gl.constexpr, UNIT: gl.constexpr, UNITS: gl.constexpr, GROUP: gl.constexpr, MANY: gl.constexpr,
    TOKENS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    LOW: gl.constexpr, HIGH: gl.constexpr, ASM: gl.constexpr, ZEROS: gl.constexpr,
    FACTOR: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Multiply and finish the rows of one warpgroup."""
    ROWS: gl.constexpr = MANY * 64
    STEPS: gl.constexpr = UNITS // SPLIT
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    pair, token_tile, part = _item(token_tiles, SPLIT)
    row = pair * (2 * ROWS) + WHICH * ROWS if GATE == "" else pair * ROWS
    tile = ((row if GATE == "" else row + WHICH * outputs) // 16).to(gl.int64)
    at = tile * (UNITS * UNIT // GROUP * 16)
    from_ = (code_ptr + tile * (UNITS * UNIT * (LOW + HIGH)), scale_ptr + at, zero_ptr + at)
    begin = part * STEPS
    for i in gl.static_range(DEPTH):
        _ask(low, high, from_[0], i, begin + i, i < STEPS, UNIT, UNITS, LOW, HIGH)
    slots = ()
    for i in gl.static_range(AHEAD):
        slots = slots + (_fetch(from_, begin + i, i < STEPS, UNIT, UNITS, GROUP, MANY, ZEROS),)
    words: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    acc = gl.zeros([ROWS, TOKENS], gl.float32, sums)
    for step in range(STEPS):
        here, slot = step % STAGES, step % DEPTH
        async_copy.wait_group(DEPTH - 1)
        low_words = _words(low.index(slot).load(words), left)
        high_words = ()
        if HIGH:
            high_words = _words(high.index(slot).load(words), left)
        mbarrier.wait(full.index(here), (step // STAGES) & 1)
        acc = _unit(acc, low_words, high_words, slots[0], x, here, UNIT, GROUP, TOKENS, LOW, HIGH, ASM, ZEROS)
        mbarrier.arrive(empty.index(here), count=1)
        _ask(low, high, from_[0], slot, begin + step + DEPTH, step + DEPTH < STEPS, UNIT, UNITS, LOW, HIGH)
        later = ()
        for i in gl.static_range(AHEAD - 1):
            later = later + (slots[i + 1],)
        next = begin + step + AHEAD
        slots = later + (_fetch(from_, next, step + AHEAD < STEPS, UNIT, UNITS, GROUP, MANY, ZEROS),)
    if FACTOR:
        acc *= gl.load(factor_ptr)
    token = token_tile * TOKENS
    if SPLIT > 1:
        wide: gl.constexpr = gl.BlockedLayout([1, 4], [128 // ROWS, ROWS // 4], [4, 1], [1, 0])
        mine = (pair * 2 + WHICH) * token_tiles + token_tile
        share = _together((acc,), sums_ptr, arrival_ptr, mine, part, tokens - token, ROWS, 1, TOKENS, SPLIT, wide)
        token += part * (TOKENS // SPLIT)
        _store(share, bias_ptr, y_ptr, row, token, tokens, outputs, BIAS, "", 0, wide)
    else:
        tall: gl.constexpr = gl.BlockedLayout([8, 1], [ROWS // 8, 256 // ROWS], [1, 4], [0, 1])
        if GATE == "":
            _store((acc,), bias_ptr, y_ptr, row, token, tokens, outputs, BIAS, "", 1, tall)
        elif WHICH == 1:
            ups.store(acc)
            barrier()  # until every thread's sums are there, before one thread says so
            mbarrier.arrive(handed, count=1)
        else:
            mbarrier.wait(handed, 0)
            _store((acc, ups.load(sums)), bias_ptr, y_ptr, row, token, tokens, outputs, BIAS, GATE, 1, tall)


@gluon.jit(do_not_specialize=["tokens"])
def wide_kernel(
    x_desc, code_ptr, scale_ptr, zero_ptr, factor_ptr, bias_ptr, y_ptr, sums_ptr, arrival_ptr, tokens, outputs,
    inputs: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, ASM: gl.constexpr, ZEROS: gl.constexpr,
    GROUP: gl.constexpr, UNIT: gl.constexpr, MANY: gl.constexpr, TOKENS: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, FACTOR: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Compute y [T, O]. x's columns are in the order of places.

    code: int16. LOW, HIGH: bits of the planes; HIGH is 0 if there is only one.
    DEPTH: units of codes that are asked for ahead.
    sums, arrival: as in gemm/hopper.py, for tiles of one warpgroup's rows.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    UNITS: gl.constexpr = inputs // UNIT
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES * (UNIT // PANEL), TOKENS, PANEL], x_desc.layout)
    ROWS: gl.constexpr = 64 * MANY if GATE != "" else 1
    COLUMNS: gl.constexpr = TOKENS if GATE != "" else 1
    ups = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
    low, high = _ring(DEPTH, 4 * MANY, UNIT * LOW), 0
    other_low, other_high = _ring(DEPTH, 4 * MANY, UNIT * LOW), 0
    if HIGH:
        high, other_high = _ring(DEPTH, 4 * MANY, UNIT * HIGH), _ring(DEPTH, 4 * MANY, UNIT * HIGH)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    handed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(handed, count=1)
    fence_async_shared()
    token_tiles = gl.cdiv(tokens, TOKENS)
    gl.warp_specialize(
        [
            (_consumer, (
                x, low, high, full, empty, ups, handed, code_ptr,
                scale_ptr, zero_ptr, factor_ptr, bias_ptr, y_ptr, sums_ptr, arrival_ptr, tokens, token_tiles, outputs,
                0, UNIT, UNITS, GROUP, MANY, TOKENS, DEPTH, STAGES, SPLIT, LOW, HIGH, ASM, ZEROS, FACTOR, BIAS, GATE,
            )),
            (_consumer, (
                x, other_low, other_high, full, empty, ups, handed, code_ptr,
                scale_ptr, zero_ptr, factor_ptr, bias_ptr, y_ptr, sums_ptr, arrival_ptr, tokens, token_tiles, outputs,
                1, UNIT, UNITS, GROUP, MANY, TOKENS, DEPTH, STAGES, SPLIT, LOW, HIGH, ASM, ZEROS, FACTOR, BIAS, GATE,
            )),
            (_producer, (x_desc, x, full, empty, tokens, token_tiles, UNIT, UNITS, TOKENS, STAGES, SPLIT, PDL)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def _constants(plan: Wide, weight_format: Any, inputs: int, dtype: torch.dtype) -> dict[str, Any]:
    low, high = (*weight_format.planes(), 0)[:2]
    return {
        "inputs": inputs, "LOW": low, "HIGH": high, "ASM": instructions(weight_format, dtype),
        "ZEROS": weight_format.zeros if weight_format.values == "levels" else "middle",
        "GROUP": weight_format.group or inputs, "UNIT": unit(weight_format), "MANY": plan.many,
        "TOKENS": plan.tokens, "DEPTH": plan.depth, "STAGES": plan.stages, "SPLIT": plan.split,
    }  # fmt: skip


def launch(plan: Wide, x_TI: Tensor, weight: Fragments, bias_O: Tensor | None, gate: str | None) -> Tensor:
    """Return the product, gated if there is a gate. x's columns are in the order of the weight's."""
    (tokens, inputs), how, device = x_TI.shape, weight.format, x_TI.device
    outputs = weight.code_OB.shape[0] // (2 if gate else 1)
    pairs = outputs // (plan.many * (64 if gate else 128))
    token_tiles = triton.cdiv(tokens, plan.tokens)
    y_TO = torch.empty(tokens, outputs, dtype=x_TI.dtype, device=device)
    sums, arrivals = x_TI, x_TI  # any pointer will do where nothing is split
    if plan.split > 1:
        size = pairs * 2 * token_tiles * plan.split * plan.many * 64 * plan.tokens
        sums = torch.empty(size, dtype=torch.float32, device=device)
        arrivals = _arrivals(device)[plan.split]
    x_TI = in_places(x_TI, span(how))
    some = [x_TI if x is None else x for x in (weight.zero_OG, weight.scale, bias_O)]
    wide_kernel[(pairs * token_tiles * plan.split,)](
        _descriptor(x_TI, min(plan.tokens, 32)), weight.code_OB.view(torch.int16), weight.scale_OG, *some, y_TO, sums,
        arrivals, tokens, outputs, **_constants(plan, how, inputs, x_TI.dtype), FACTOR=weight.scale is not None,
        BIAS=bias_O is not None, GATE=gate or "", num_warps=4, **launch_options(device),
    )  # fmt: skip
    return y_TO


def _aot(plan: Wide, gate: str) -> AotKernel:
    signature = {"x_desc": f"tensordesc<bf16[{min(plan.tokens, 32)}, {PANEL.value}],{_descriptor_layout()!r}>"}
    signature |= {"code_ptr": "*i16", "scale_ptr": "*fp16", "zero_ptr": "*u8", "factor_ptr": "*fp32"}
    signature |= {"bias_ptr": "*bf16", "y_ptr": "*bf16", "sums_ptr": "*fp32", "arrival_ptr": "*i32"}
    signature |= {"tokens": "i32", "outputs": "i32:16"}
    constants = _constants(plan, W4, 4096, torch.bfloat16) | {"FACTOR": False, "BIAS": False, "GATE": gate}
    return AotKernel(wide_kernel, signature, constants, num_warps=4, hot=True, tensor_cores="HGMMA", archs=("sm_90",))


AOT = (_aot(Wide(many=1, tokens=128, depth=8, stages=3), ""),)
