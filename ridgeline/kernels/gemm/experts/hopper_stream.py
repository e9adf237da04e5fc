"""Experts' products for Hopper where the memory is the bound: weights are streamed once, at the memory's rate.

Weights are the left operand of the matrix units, and an expert's pairs are the columns, as in hopper/stream.py.
One warp streams blocks of weights into a ring of shared memory, four more gather the pairs' rows of x into it, and the
rest multiply and finish items. The producers run ahead over the borders of items, so the memory never waits.

The blocks of all items are cut into equal shares, one for each program, so all programs work equally long. If an item
lies in several shares, the program that comes to its end last adds the sums of all and finishes it; the others leave
theirs in float32. As a rule that is the program with the item's first block: for it the item is the last one of its
share, and for the programs with the rest it is the first. The order of additions is that of the blocks, whoever adds,
and no program waits for another.

Legend:
    C  weight rows of one part, which are the outputs of a tile
    W  pairs of a tile
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.gemm.experts.hopper_codes import coded_products, coded_warp_products, lifted
from ridgeline.kernels.gemm.experts.hopper_load import gatherer, streamer
from ridgeline.kernels.gemm.experts.hopper_sums import products, promoted, promoted_by_rows, rescaled, times
from ridgeline.kernels.gemm.experts.hopper_walk import begin_share, counts_of, next_piece, owner, slots
from ridgeline.kernels.hopper.finish import leave, left_by, plus, store, tall
from ridgeline.kernels.hopper.gluon_names import barrier, barriers, viewed


@gluon.jit
def _arrives_last(sums, sums_ptr, flag_ptr, begin, end, early, pairs, SIZE: gl.constexpr, WARPS: gl.constexpr):
    """Return True in the last of the programs `begin` to `end`, which share an item, that comes here. All leave their
    sums.

    A program has a place for the sums of the item in which its share begins, and one for those of the last, which goes
    on in the next program's share. Flags are 0 between launches.

    early: whether the other programs' sums should be there long before those of the first. That one then asks whether
        they are, for which its own sums need not have been written.
    """
    own = gl.program_id(0)
    others = end - begin
    leave(sums, sums_ptr + (2 * own + gl.where(own == begin, 1, 0)) * SIZE, pairs, WARPS)
    arrived = others * 0
    if early & (own == begin):
        arrived = gl.atomic_add(flag_ptr + begin, 0, sem="acquire")
    if arrived != others:
        barrier()  # until every thread's sums are written, before one thread says so
        arrived = gl.atomic_add(flag_ptr + begin, 1, sem="acq_rel")
    last = arrived == others
    if last:
        gl.store(flag_ptr + begin, 0)
    return last


@gluon.jit
def _added(sums, sums_ptr, begin, end, pairs, SIZE: gl.constexpr, WARPS: gl.constexpr):
    """Return the sums of the programs `begin` to `end` in their order."""
    if gl.program_id(0) != begin:
        sums = left_by(sums_ptr + (2 * begin + 1) * SIZE, sums, pairs, WARPS)
    for other in range(begin + 1, end + 1):
        sums = plus(sums, left_by(sums_ptr + 2 * other * SIZE, sums, pairs, WARPS))
    return sums


@gluon.jit
def _finish(
    w, s, z, x, full, empty, scale_ptr, x_scale_ptr, token_ptr, factor_ptr, bias_ptr, y_ptr, sums_ptr, flag_ptr, step,
    steps, at, total, expert, row, pair, last,
    WIDTH: gl.constexpr, INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr,
    TOKENS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr, SPAN: gl.constexpr,
    FACTOR: gl.constexpr, GATHER: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr, APART: gl.constexpr,
    ZEROS: gl.constexpr,
):  # fmt: skip
    """Multiply a piece of an item, and finish the item or leave the piece.

    at: the piece's first block among those of all items.
    last: the end of the expert's pairs.
    """
    BLOCKS: gl.constexpr = (INPUTS + BLOCK - 1) // BLOCK
    PANELS: gl.constexpr = BLOCK // x.shape[2]
    SIZE: gl.constexpr = PARTS * ROWS * TOKENS
    WARPS: gl.constexpr = gl.num_warps()
    block = at % BLOCKS
    # Whose pieces these are is known before the products, which take much longer. A branch around it would make ptxas
    # run the products one by one
    begin = owner(at - block, gl.num_programs(0), total)
    end = owner(at - block + (BLOCKS - 1), gl.num_programs(0), total)
    early = (end == begin + 1) & (2 * (BLOCKS - steps) * gl.num_programs(0) <= total)
    if APART:
        sums = coded_warp_products(
            w, s, z, x, full, empty, step, steps, ROWS, PARTS, WIDTH, STAGES, KIND == "levels", ZEROS
        )  # fmt: skip
    elif KIND == "e2m1":
        sums = coded_products(w, s, x, full, empty, step, steps, ROWS, PARTS, WIDTH, STAGES)
    elif KIND == "fp8" and SPAN == 32:
        WORDS: gl.constexpr = INPUTS // 128
        sums = promoted_by_rows(
            w, x, s, full, empty, scale_ptr + expert * (PARTS * OUTPUTS * WORDS), step, steps, block, row,
            ROWS, PARTS, WIDTH, PANELS, STAGES, WORDS, OUTPUTS,
        )  # fmt: skip
    elif KIND == "fp8" and SPAN > 1:
        COLUMNS: gl.constexpr = (INPUTS + SPAN - 1) // SPAN
        LINES: gl.constexpr = (PARTS * OUTPUTS + SPAN - 1) // SPAN
        sums = promoted(
            w, x, s, full, empty, scale_ptr + (expert * LINES + row // SPAN) * COLUMNS, step, steps, block,
            ROWS, PARTS, WIDTH, PANELS, STAGES, COLUMNS, OUTPUTS // SPAN * COLUMNS,
        )  # fmt: skip
    else:
        sums = products(w, x, full, empty, step, steps, ROWS, PARTS, WIDTH, PANELS, STAGES)
    mine = True
    if begin < end:
        mine = _arrives_last(sums, sums_ptr, flag_ptr, begin, end, early, last - pair, SIZE, WARPS)
    if mine:
        if begin < end:
            sums = _added(sums, sums_ptr, begin, end, last - pair, SIZE, WARPS)
        if KIND == "e2m1" or KIND == "levels":
            sums = lifted(sums, factor_ptr, expert, PARTS, FACTOR, KIND == "levels")
        elif KIND == "fp8" and SPAN == 32 and FACTOR:
            sums = times(sums, factor_ptr, expert, PARTS)
        elif KIND == "fp8" and SPAN == 1:
            sums = rescaled(
                sums, scale_ptr, x_scale_ptr, token_ptr, expert, row, pair, last, OUTPUTS, PARTS, GATHER
            )  # fmt: skip
        own_bias_ptr = bias_ptr + expert * (PARTS * OUTPUTS)
        store(sums, own_bias_ptr, y_ptr, row, pair, last, OUTPUTS, BIAS, GATE, tall(ROWS, WARPS))


@gluon.jit
def _consumer(
    w, s, z, x, full, empty, counts, scale_ptr, x_scale_ptr, token_ptr, factor_ptr, bias_ptr, y_ptr, sums_ptr, flag_ptr,
    at, end, total, expert, place, first, count,
    INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, TILES: gl.constexpr,
    TOKENS: gl.constexpr, NARROW: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr,
    SPAN: gl.constexpr, FACTOR: gl.constexpr, GATHER: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr,
    APART: gl.constexpr, ZEROS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply and finish all pieces of this program."""
    BLOCKS: gl.constexpr = (INPUTS + BLOCK - 1) // BLOCK
    if PDL and KIND == "fp8" and SPAN == 1:
        gdc_wait()  # the kernel before writes the scales of x
    step = at * 0
    while at < end:
        units = (count + (TOKENS - 1)) // TOKENS
        pair = first + place % units * TOKENS
        row = place // units * ROWS
        steps = gl.minimum(BLOCKS - at % BLOCKS, end - at)
        if first + count - pair <= NARROW:
            _finish(
                w, s, z, x, full, empty, scale_ptr, x_scale_ptr, token_ptr, factor_ptr, bias_ptr, y_ptr, sums_ptr,
                flag_ptr, step, steps, at, total, expert, row, pair, first + count,
                NARROW, INPUTS, OUTPUTS, ROWS, PARTS, TOKENS, BLOCK, STAGES, KIND, SPAN, FACTOR, GATHER, BIAS, GATE,
                APART, ZEROS,
            )  # fmt: skip
        else:
            _finish(
                w, s, z, x, full, empty, scale_ptr, x_scale_ptr, token_ptr, factor_ptr, bias_ptr, y_ptr, sums_ptr,
                flag_ptr, step, steps, at, total, expert, row, pair, first + count,
                TOKENS, INPUTS, OUTPUTS, ROWS, PARTS, TOKENS, BLOCK, STAGES, KIND, SPAN, FACTOR, GATHER, BIAS, GATE,
                APART, ZEROS,
            )  # fmt: skip
        step += steps
        at += steps
        expert, place, first, count = next_piece(counts, at, end, expert, place, first, count, TOKENS, TILES)


@gluon.jit
def _beside(TYPE: gl.constexpr, KIND: gl.constexpr, SPAN: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr,
            TOKENS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Return shared memory for the scales that travel through the ring, if there are any. TYPE: of scales of codes."""
    if KIND == "e2m1" or KIND == "levels":
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        return gl.allocate_shared_memory(TYPE, [STAGES * PARTS, ROWS // 64, 64 * BLOCK // SPAN], flat)
    else:
        line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        BLOCKED: gl.constexpr = KIND == "fp8" and SPAN > 1
        PANELS: gl.constexpr = BLOCK // 128 if BLOCKED else 1
        return gl.allocate_shared_memory(gl.float32, [STAGES * PANELS if BLOCKED else 1, TOKENS], line)


@gluon.jit(do_not_specialize=["x_rows"])
def grouped_stream_kernel(
    x_ptr, w_desc, scale_ptr, zero_ptr, x_scale_ptr, factor_ptr, bias_ptr, token_ptr, start_ptr, y_ptr, sums_ptr,
    flag_ptr, x_rows,
    E: gl.constexpr, INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    NARROW: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr, SPAN: gl.constexpr,
    FACTOR: gl.constexpr, GATHER: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr, APART: gl.constexpr,
    ZEROS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute y [P, O] of the pairs that some expert computes.

    GATHER: a pair's row of x is its token's; otherwise x has a row for each pair, which the kernel before may still be
        writing. Routes must then be older: of the kernels since route, one waited for what was before it ere it let the
        next one start, as this kernel does when it gathers.
    GATE: "" or the activation. With one an expert's rows are O gates, then O ups.
    sums: float32 [programs, 2, PARTS, ROWS * TOKENS].
    flag: a counter for each program, 0 between launches.
    KIND: "" for weights of 16 bits; "fp8" for E4M3 beside rounded activations; "e2m1" for MXFP4 and "levels" for levels
        of four bits, both as packed.py has them. Levels are multiplied apart.
    SPAN: outputs, and inputs, that share a scale of FP8; 1 if each output has its own; 32 if each has an exponent for
        each 32 inputs, four in a word. Of codes the inputs that do.
    APART: single warps multiply, with codes alone; four of them, and one more gathers.
    ZEROS: levels have a zero for each scale.
    scale: as the forms have them. x_scale: [x_rows], or [blocks of 128 inputs, x_rows] if SPAN is not 1.
    """
    PARTS: gl.constexpr = 1 if GATE == "" else 2
    TILES: gl.constexpr = (OUTPUTS + ROWS - 1) // ROWS
    BLOCKS: gl.constexpr = (INPUTS + BLOCK - 1) // BLOCK
    BITS: gl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    PANEL: gl.constexpr = 1024 // BITS
    CODED: gl.constexpr = KIND == "e2m1" or KIND == "levels"
    BYTES: gl.constexpr = BLOCK // 2 if CODED else BLOCK * BITS // 8
    BESIDE: gl.constexpr = "codes" if CODED else ("rows" if KIND == "fp8" and SPAN > 1 else "")
    x_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=BITS, rank=2)
    x = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES * (BLOCK // PANEL), TOKENS, PANEL], x_layout)
    HEIGHT: gl.constexpr = ROWS // 2 if CODED else ROWS
    WEIGHT_PANELS: gl.constexpr = 1 if CODED else BLOCK // PANEL
    w_shape: gl.constexpr = w_desc.block_shape
    w = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES * PARTS * WEIGHT_PANELS, HEIGHT, w_shape[1]], w_desc.layout
    )  # fmt: skip
    z = _beside(zero_ptr.dtype.element_ty, "levels" if ZEROS else "", SPAN, ROWS, PARTS, TOKENS, BLOCK, STAGES)
    s = _beside(scale_ptr.dtype.element_ty, KIND, SPAN, ROWS, PARTS, TOKENS, BLOCK, STAGES)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    counts = gl.allocate_shared_memory(gl.int32, [slots(E), 1], flat)
    GATHERERS: gl.constexpr = 1 if APART else 4
    full, empty = barriers(STAGES, 1 + GATHERERS * 32), barriers(STAGES, 1)
    fence_async_shared()
    if PDL:
        if GATHER:
            gdc_wait()
        gdc_launch_dependents()
    i_S, start_S, count_S = counts_of(start_ptr, E)
    viewed(counts, [slots(E)], flat).store(count_S)
    at, end, total, expert, place, first, count = begin_share(
        i_S, start_S, count_S, gl.program_id(0), gl.num_programs(0), E, TOKENS, TILES, BLOCKS
    )
    gl.warp_specialize(
        [
            (_consumer, (
                w, s, z, x, full, empty, counts, scale_ptr, x_scale_ptr, token_ptr, factor_ptr, bias_ptr, y_ptr,
                sums_ptr, flag_ptr, at, end, total, expert, place, first, count, INPUTS, OUTPUTS, ROWS, PARTS, TILES,
                TOKENS, NARROW, BLOCK, STAGES, KIND, SPAN, FACTOR, GATHER, BIAS, GATE, APART, ZEROS, PDL,
            )),
            (gatherer, (
                x_ptr, token_ptr, scale_ptr if CODED else x_scale_ptr, zero_ptr, x_rows, counts, x, s, z, full, empty,
                at, end, expert, place, first, count, INPUTS, OUTPUTS, ROWS, PARTS, TILES, TOKENS, NARROW, BLOCK,
                STAGES, GATHER, BESIDE, ZEROS, PDL,
            )),
            (streamer, (
                w_desc, counts, w, full, empty, at, end, expert, place, first, count,
                INPUTS, OUTPUTS, ROWS, PARTS, TILES, TOKENS, BLOCK, STAGES, BYTES, CODED,
            )),
        ],
        [GATHERERS, 1],
        [40 if APART else 72, 40],
    )  # fmt: skip
