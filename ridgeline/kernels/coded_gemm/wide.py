"""Linear maps of weights in fragments, for a dozen to some hundreds of tokens on Hopper: hopper.py with scales in the
operands, so that the matrix units never wait for them.

hopper.py ends the products of every group, multiplies their sums with the group's scale and adds these up: half a
register's multiply-add for each token and row, and matrix units that stand still meanwhile. Here scales multiply the
codes in the same instruction that takes the zero away, the sums stay in the matrix units' accumulators from the first
input to the last, and while these multiply a unit the next one's operands are made. A weight is then rounded to x's
type, as a dequantized one is. Programs stay and take tiles in turn; codes of the next tile are asked for before the
last sums of this one are written.

Legend:
    R  rows of a warpgroup
    P  places of a slice, 16
    T  tokens of a tile
    G  groups of a unit
"""

# mypy: disable-error-code="assignment, misc, unreachable"
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

from ridgeline.core.weight_format import CodedFormat
from ridgeline.kernels.aot import AotKernel
from ridgeline.kernels.coded_gemm.choose import Wide
from ridgeline.kernels.coded_gemm.fragments import Fragments, span, unit
from ridgeline.kernels.coded_gemm.fragments_asm import scaled, scaled_operands, subtracted
from ridgeline.kernels.coded_gemm.fragments_kernel import _groups, _number
from ridgeline.kernels.coded_gemm.hopper import _ask, _each, _ring, _scales, _words
from ridgeline.kernels.coded_gemm.op import Q4_K, W4
from ridgeline.kernels.coded_gemm.places import in_places
from ridgeline.kernels.coded_gemm.ring import _next
from ridgeline.kernels.gemm.hopper import (
    PANEL,
    _arrivals,
    _barriers,
    _descriptor,
    _descriptor_layout,
    _load_tokens,
    _store,
    _together,
    barrier,
)
from ridgeline.kernels.launch import launch_options, num_multiprocessors


@gluon.jit
def _operands(
    low, high, slot, x, UNIT: gl.constexpr, GROUP: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr,
    ASM: gl.constexpr, EVEN: gl.constexpr, ODD: gl.constexpr, ZERO: gl.constexpr, ZEROS: gl.constexpr,
    NESTED: gl.constexpr, left: gl.constexpr,
):  # fmt: skip
    """Return the slices of a unit as left operands, times their scales: a tuple of [R, P].

    low, high: the words of the planes, as tuples of left operands.
    slot: see `_fetch`.
    x: anything of x's type.
    """
    COUNT: gl.constexpr = _groups(UNIT, GROUP)
    EACH: gl.constexpr = UNIT // 16 // COUNT  # slices of a group
    row: gl.constexpr = gl.SliceLayout(1, left)
    scales, zeros = _each(slot[0], row), _each(slot[1], row)
    outer, outer_minimum = _each(slot[2], row), _each(slot[3], row)
    found = ()
    for group in gl.static_range(COUNT):
        minus = 0
        if ZEROS == "levels":
            minus = subtracted(zeros[group], LOW + HIGH, x.dtype)[:, None]
        scale_R = _number(scales[group])
        if NESTED:
            scale_R *= outer[0].to(gl.float32)
        scale_R = scale_R.to(x.dtype).to(gl.float32)
        even = (scale_R * EVEN).to(x.dtype)[:, None]
        odd = (scale_R * ODD).to(x.dtype)[:, None]
        zero_R = scale_R
        if ZEROS == "minimum":
            zero_R = _number(zeros[group])
            if NESTED:
                zero_R *= outer_minimum[0].to(gl.float32)
        zero = (zero_R * ZERO).to(x.dtype)[:, None]
        for i in gl.static_range(group * EACH, group * EACH + EACH):
            by = even if i % 2 == 0 else odd
            found = found + (scaled_operands(low, high, minus, by, zero, i, LOW, HIGH, ASM, ZEROS, x),)
    return found


@gluon.jit
def _fetch(
    at, unit, more, UNIT: gl.constexpr, UNITS: gl.constexpr, GROUP: gl.constexpr, MANY: gl.constexpr,
    ZEROS: gl.constexpr, NESTED: gl.constexpr,
):  # fmt: skip
    """Ask for the numbers of a unit: scales, zeros or minima, outer scales, outer minima. Scales stand for what there
    is not."""
    scale = _scales(at[1], unit, more, UNIT, UNITS, GROUP, MANY)
    zero, outer, outer_minimum = scale, scale, scale
    if ZEROS != "middle":
        zero = _scales(at[2], unit, more, UNIT, UNITS, GROUP, MANY)
    if NESTED:
        outer = _scales(at[3], unit, more, UNIT, UNITS, 256, MANY)
        if ZEROS == "minimum":
            outer_minimum = _scales(at[4], unit, more, UNIT, UNITS, 256, MANY)
    return (scale, zero, outer, outer_minimum)


@gluon.jit
def _item(item, TILES: gl.constexpr, SPLIT: gl.constexpr):
    """Return (pair of row tiles, token tile, part). Programs of one row tile run side by side."""
    rest = item // TILES
    return rest // SPLIT, item % TILES, rest % SPLIT


@gluon.jit
def _producer(
    x_desc, x, full, empty, items, tokens, UNIT: gl.constexpr, UNITS: gl.constexpr, TOKENS: gl.constexpr,
    TILES: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Fill the ring with units of x, for all items of this program."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _, token_tile, part = _item(item, TILES, SPLIT)
        for step in range(UNITS // SPLIT):
            here = count % STAGES
            mbarrier.wait(empty.index(here), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(here), TOKENS * UNIT * 2)
            first = (part * (UNITS // SPLIT) + step) * UNIT
            _load_tokens(x_desc, x, full, here, token_tile * TOKENS, first, tokens, UNIT // PANEL)
            count += 1


@gluon.jit
def _begun(
    item, from_, outputs,
    WHICH: gl.constexpr, TILES: gl.constexpr, UNIT: gl.constexpr, UNITS: gl.constexpr, GROUP: gl.constexpr,
    MANY: gl.constexpr, SPLIT: gl.constexpr, BITS: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Return where an item's codes and numbers begin, and its first unit."""
    ROWS: gl.constexpr = MANY * 64
    pair, _, part = _item(item, TILES, SPLIT)
    row = pair * (2 * ROWS) + WHICH * ROWS if GATE == "" else pair * ROWS + WHICH * outputs
    tile = (row // 16).to(gl.int64)
    at, outer = tile * (UNITS * UNIT // GROUP * 16), tile * (UNITS * UNIT // 256 * 16)
    codes = from_[0] + tile * (UNITS * UNIT * BITS)
    return (codes, from_[1] + at, from_[2] + at, from_[3] + outer, from_[4] + outer), part * (UNITS // SPLIT)


@gluon.constexpr_function
def _ahead(many, tokens):
    """Return how many units' scales are asked for ahead: they come after about 2,000 cycles."""
    return 4 if many * tokens <= 64 else 2


@gluon.jit
def _made(
    low, high, slot, ask, get, numbers, from_, items, outputs, like,
    WHICH: gl.constexpr, TILES: gl.constexpr, UNIT: gl.constexpr, UNITS: gl.constexpr, GROUP: gl.constexpr,
    MANY: gl.constexpr, TOKENS: gl.constexpr, DEPTH: gl.constexpr, SPLIT: gl.constexpr, LOW: gl.constexpr,
    HIGH: gl.constexpr, ASM: gl.constexpr, EVEN: gl.constexpr, ODD: gl.constexpr, ZERO: gl.constexpr,
    ZEROS: gl.constexpr, NESTED: gl.constexpr, GATE: gl.constexpr, left: gl.constexpr,
):  # fmt: skip
    """Return the operands of the next unit, and what is under way then.

    slot: where the unit's codes are. ask, get: (item, step) of the next codes and the next scales to be asked for.
    numbers: (scales, zeros) of this unit and of those behind it.
    """
    STEPS: gl.constexpr = UNITS // SPLIT
    words: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    async_copy.wait_group(DEPTH - 1)
    low_words = _words(low.index(slot).load(words), left)
    high_words = ()
    if HIGH:
        high_words = _words(high.index(slot).load(words), left)
    at, unit = _begun(ask[0], from_, outputs, WHICH, TILES, UNIT, UNITS, GROUP, MANY, SPLIT, LOW + HIGH, GATE)
    _ask(low, high, at[0], slot, unit + ask[1], ask[0] < items, UNIT, UNITS, LOW, HIGH)
    at, unit = _begun(get[0], from_, outputs, WHICH, TILES, UNIT, UNITS, GROUP, MANY, SPLIT, LOW + HIGH, GATE)
    fresh = _fetch(at, unit + get[1], get[0] < items, UNIT, UNITS, GROUP, MANY, ZEROS, NESTED)
    a = _operands(
        low_words, high_words, numbers[0], like, UNIT, GROUP, LOW, HIGH, ASM, EVEN, ODD, ZERO, ZEROS, NESTED, left
    )
    later = ()
    for i in gl.static_range(_ahead(MANY, TOKENS) - 1):
        later = later + (numbers[i + 1],)
    slot = gl.where(slot == DEPTH - 1, 0, slot + 1)
    return a, slot, _next(ask[0], ask[1], STEPS), _next(get[0], get[1], STEPS), later + (fresh,)


@gluon.jit
def _consumer(
    x, low, high, full, empty, ups, handed, taken, code_ptr, scale_ptr, zero_ptr, outer_ptr,
    outer_minimum_ptr, factor_ptr, bias_ptr, y_ptr, sums_ptr, arrival_ptr, items, tokens, outputs,
    WHICH: gl.constexpr, TILES: gl.constexpr, UNIT: gl.constexpr, UNITS: gl.constexpr, GROUP: gl.constexpr,
    MANY: gl.constexpr, TOKENS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    LOW: gl.constexpr, HIGH: gl.constexpr, ASM: gl.constexpr, EVEN: gl.constexpr, ODD: gl.constexpr,
    ZERO: gl.constexpr, POWER: gl.constexpr, ZEROS: gl.constexpr, NESTED: gl.constexpr,
    FACTOR: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Multiply and finish the rows of one warpgroup, for all items of this program."""
    ROWS: gl.constexpr = MANY * 64
    STEPS: gl.constexpr = UNITS // SPLIT
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    like = gl.full([1], 0, x.dtype, gl.SliceLayout(0, sums))  # for its type only
    from_ = (code_ptr, scale_ptr, zero_ptr, outer_ptr, outer_minimum_ptr)
    ask, get, numbers = (gl.program_id(0), 0), (gl.program_id(0), 0), ()
    for i in gl.static_range(DEPTH):
        at, unit = _begun(ask[0], from_, outputs, WHICH, TILES, UNIT, UNITS, GROUP, MANY, SPLIT, LOW + HIGH, GATE)
        _ask(low, high, at[0], i, unit + ask[1], ask[0] < items, UNIT, UNITS, LOW, HIGH)
        ask = _next(ask[0], ask[1], STEPS)
    for _step in gl.static_range(_ahead(MANY, TOKENS)):
        at, unit = _begun(get[0], from_, outputs, WHICH, TILES, UNIT, UNITS, GROUP, MANY, SPLIT, LOW + HIGH, GATE)
        numbers = numbers + (_fetch(at, unit + get[1], get[0] < items, UNIT, UNITS, GROUP, MANY, ZEROS, NESTED),)
        get = _next(get[0], get[1], STEPS)
    factor = POWER
    if FACTOR:
        factor = POWER * gl.load(factor_ptr)
    a, slot, ask, get, numbers = _made(
        low, high, 0, ask, get, numbers, from_, items, outputs, like, WHICH, TILES, UNIT, UNITS, GROUP, MANY,
        TOKENS, DEPTH, SPLIT, LOW, HIGH, ASM, EVEN, ODD, ZERO, ZEROS, NESTED, GATE, left,
    )  # fmt: skip
    count, turn = 0, 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        acc = gl.zeros([ROWS, TOKENS], gl.float32, sums)
        for _ in range(STEPS):
            here = count % STAGES
            mbarrier.wait(full.index(here), (count // STAGES) & 1)
            for i in gl.static_range(UNIT // 16):
                b = x.index(here * (UNIT // PANEL) + i // 4).slice(i % 4 * 16, 16, 1).permute((1, 0))
                acc = warpgroup_mma(a[i], b, acc, is_async=True)
            later, slot, ask, get, numbers = _made(
                low, high, slot, ask, get, numbers, from_, items, outputs, like, WHICH, TILES, UNIT, UNITS,
                GROUP, MANY, TOKENS, DEPTH, SPLIT, LOW, HIGH, ASM, EVEN, ODD, ZERO, ZEROS, NESTED, GATE, left,
            )  # fmt: skip
            # The operands must stay in their registers until the products are done
            acc = warpgroup_mma_wait(0, deps=(acc,) + a)[0]
            mbarrier.arrive(empty.index(here), count=1)
            a = later
            count += 1
        acc *= factor
        pair, token_tile, part = _item(item, TILES, SPLIT)
        row = pair * (2 * ROWS) + WHICH * ROWS if GATE == "" else pair * ROWS
        token = token_tile * TOKENS
        if SPLIT > 1:
            wide: gl.constexpr = gl.BlockedLayout([1, 4], [128 // ROWS, ROWS // 4], [4, 1], [1, 0])
            mine = (pair * 2 + WHICH) * TILES + token_tile
            share = _together((acc,), sums_ptr, arrival_ptr, mine, part, tokens - token, ROWS, 1, TOKENS, SPLIT, wide)
            token += part * (TOKENS // SPLIT)
            _store(share, bias_ptr, y_ptr, row, token, tokens, outputs, BIAS, "", 0, wide)
        else:
            tall: gl.constexpr = gl.BlockedLayout([8, 1], [ROWS // 8, 256 // ROWS], [1, 4], [0, 1])
            if GATE == "":
                _store((acc,), bias_ptr, y_ptr, row, token, tokens, outputs, BIAS, "", 1, tall)
            elif WHICH == 1:
                mbarrier.wait(taken, (turn & 1) ^ 1)
                ups.store(acc)
                barrier()  # until every thread's sums are there, before one thread says so
                mbarrier.arrive(handed, count=1)
            else:
                mbarrier.wait(handed, turn & 1)
                up = ups.load(sums)
                barrier()
                mbarrier.arrive(taken, count=1)
                _store((acc, up), bias_ptr, y_ptr, row, token, tokens, outputs, BIAS, GATE, 1, tall)
        turn += 1  # noqa: SIM113 - Gluon knows no enumerate


@gluon.jit(do_not_specialize=["tokens"])
def scaled_kernel(
    x_desc, code_ptr, scale_ptr, zero_ptr, outer_ptr, outer_minimum_ptr, factor_ptr, bias_ptr, y_ptr, sums_ptr,
    arrival_ptr, tokens, outputs,
    inputs: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, ASM: gl.constexpr, EVEN: gl.constexpr,
    ODD: gl.constexpr, ZERO: gl.constexpr, POWER: gl.constexpr, ZEROS: gl.constexpr, NESTED: gl.constexpr,
    GROUP: gl.constexpr, UNIT: gl.constexpr, MANY: gl.constexpr, TOKENS: gl.constexpr, TILES: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, FACTOR: gl.constexpr, BIAS: gl.constexpr,
    GATE: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute y [T, O]. x's columns are in the order of places.

    code: int16. LOW, HIGH: bits of the planes; HIGH is 0 if there is only one.
    EVEN, ODD, ZERO, POWER: see `Scaled`.
    TILES: tiles of TOKENS tokens.
    REGISTERS: of a thread that multiplies.
    DEPTH: units of codes that are asked for ahead.
    sums, arrival: as in gemm/hopper.py, for tiles of one warpgroup's rows. With a SPLIT there is a program for every
    item.
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
    full, empty = _barriers(STAGES), _barriers(STAGES, 2)
    handed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(handed, count=1)
    mbarrier.init(taken, count=1)
    fence_async_shared()
    items = outputs // ((64 if GATE != "" else 128) * MANY) * TILES * SPLIT
    gl.warp_specialize(
        [
            (_consumer, (
                x, low, high, full, empty, ups, handed, taken, code_ptr, scale_ptr, zero_ptr, outer_ptr,
                outer_minimum_ptr, factor_ptr, bias_ptr, y_ptr, sums_ptr, arrival_ptr, items, tokens, outputs,
                0, TILES, UNIT, UNITS, GROUP, MANY, TOKENS, DEPTH, STAGES, SPLIT,
                LOW, HIGH, ASM, EVEN, ODD, ZERO, POWER, ZEROS, NESTED, FACTOR, BIAS, GATE,
            )),
            (_consumer, (
                x, other_low, other_high, full, empty, ups, handed, taken, code_ptr, scale_ptr, zero_ptr, outer_ptr,
                outer_minimum_ptr, factor_ptr, bias_ptr, y_ptr, sums_ptr, arrival_ptr, items, tokens, outputs,
                1, TILES, UNIT, UNITS, GROUP, MANY, TOKENS, DEPTH, STAGES, SPLIT,
                LOW, HIGH, ASM, EVEN, ODD, ZERO, POWER, ZEROS, NESTED, FACTOR, BIAS, GATE,
            )),
            (_producer, (x_desc, x, full, empty, items, tokens, UNIT, UNITS, TOKENS, TILES, STAGES, SPLIT, PDL)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def _constants(plan: Wide, how: CodedFormat, inputs: int, dtype: torch.dtype) -> dict[str, Any]:
    low, high = (*how.planes(), 0)[:2]
    form = scaled(how, dtype)
    return {
        "inputs": inputs, "LOW": low, "HIGH": high, "ASM": form.asm, "EVEN": form.even, "ODD": form.odd,
        "ZERO": form.zero, "POWER": form.power, "ZEROS": how.zeros if how.values == "levels" else "middle",
        "NESTED": how.nested,
        "GROUP": how.group or inputs, "UNIT": unit(how), "MANY": plan.many, "TOKENS": plan.tokens,
        "DEPTH": plan.depth, "STAGES": plan.stages, "SPLIT": plan.split,
        "REGISTERS": (3 * plan.registers - 24) // 16 * 8,  # what three warpgroups have, less what the third needs
    }  # fmt: skip


def launch(
    plan: Wide, x_TI: Tensor, weight: Fragments, bias_O: Tensor | None, gate: str | None, placed: bool = False
) -> Tensor:
    """Return the product, gated if there is a gate. x's columns are in the order of the weight's, or already `placed`
    as the kernel reads them."""
    (tokens, inputs), how, device = x_TI.shape, weight.format, x_TI.device
    outputs = weight.code_OB.shape[0] // (2 if gate else 1)
    pairs = outputs // (plan.many * (64 if gate else 128))
    token_tiles = triton.cdiv(tokens, plan.tokens)
    items = pairs * token_tiles * plan.split
    y_TO = torch.empty(tokens, outputs, dtype=x_TI.dtype, device=device)
    sums, arrivals = x_TI, x_TI  # any pointer will do where nothing is split
    if plan.split > 1:
        sums = torch.empty(items * 2 * plan.many * 64 * plan.tokens, dtype=torch.float32, device=device)
        arrivals = _arrivals(device)[plan.split]
    x_TI = x_TI if placed else in_places(x_TI, span(how))
    numbers = (weight.zero_OG, weight.outer_OS, weight.outer_minimum_OS, weight.scale, bias_O)
    some = [x_TI if x is None else x for x in numbers]
    programs = items if plan.split > 1 else min(items, num_multiprocessors(device))
    scaled_kernel[(programs,)](
        _descriptor(x_TI, min(plan.tokens, 32)), weight.code_OB.view(torch.int16), weight.scale_OG, *some, y_TO, sums,
        arrivals, tokens, outputs, **_constants(plan, how, inputs, x_TI.dtype), TILES=token_tiles,
        FACTOR=weight.scale is not None, BIAS=bias_O is not None, GATE=gate or "", num_warps=4,
        maxnreg=plan.registers, **launch_options(device),
    )  # fmt: skip
    return y_TO


def _aot(plan: Wide, gate: str, how: CodedFormat = W4, scale: str = "*fp16") -> AotKernel:
    signature = {"x_desc": f"tensordesc<bf16[{min(plan.tokens, 32)}, {PANEL.value}],{_descriptor_layout()!r}>"}
    signature |= {"code_ptr": "*i16", "scale_ptr": scale, "zero_ptr": scale, "outer_ptr": "*fp16"}
    signature |= {"outer_minimum_ptr": "*fp16", "factor_ptr": "*fp32", "bias_ptr": "*bf16", "y_ptr": "*bf16"}
    signature |= {"sums_ptr": "*fp32", "arrival_ptr": "*i32", "tokens": "i32", "outputs": "i32:16"}
    constants = _constants(plan, how, 4096, torch.bfloat16) | {"TILES": 1, "FACTOR": False, "BIAS": False, "GATE": gate}
    # with 256 tokens two registers are spilled at the ends of tiles, none in between
    return AotKernel(
        scaled_kernel,
        signature,
        constants,
        num_warps=4,
        registers=plan.registers,
        hot=plan.tokens < 256,
        tensor_cores="HGMMA",
        archs=("sm_90",),
    )


AOT = (
    _aot(Wide(many=2, tokens=64, depth=4, stages=4, scaled=True), "silu"),
    _aot(Wide(many=1, tokens=256, depth=6, stages=2, scaled=True), ""),
    _aot(Wide(many=1, tokens=64, depth=8, stages=5, split=4, scaled=True), "", Q4_K, "*i8"),
)
