"""Experts' products for Hopper where the memory is the bound: weights are streamed once, at the memory's rate.

Weights are the left operand of the matrix units, and an expert's pairs are the columns, as in gemm/hopper.py. One warp
streams blocks of weights into a ring of shared memory, four more gather the pairs' rows of x into it, and the rest
multiply and finish items. The producers run ahead over the borders of items, so the memory never waits.

The blocks of all items are cut into equal shares, one for each program, so none works longer than another. An item
that a share cuts is finished by the program that has its first block: it comes to it last, and the programs behind it,
which have the rest, come to theirs first. They leave float32 sums, and the first program adds them in order.

Legend:
    C  weight rows of one part, which are the outputs of a tile
    W  pairs of a tile
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.gemm.hopper import PANEL, _awaited, _store, barrier
from ridgeline.kernels.gluon_names import load_rows, load_tile, viewed
from ridgeline.kernels.grouped_gemm.hopper_walk import begin_share, counts_of, next_piece, share, slots
from ridgeline.kernels.grouped_gemm.hopper_widen import first_rows, rescaled, scaler, widened_products


@gluon.jit
def gather_rows(
    x_ptr, token_ptr, x, full, empty, step, steps, pair, pairs, block,
    WIDTH: gl.constexpr, INPUTS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, GATHER: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Copy blocks of the rows of up to WIDTH pairs into the ring, as `steps` stages from `step` on. Rows behind the
    last pair, and columns behind the last input, become zeros."""
    PANELS: gl.constexpr = BLOCK // PANEL
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    row_W = gl.arange(0, WIDTH, gl.SliceLayout(1, layout))
    column = gl.expand_dims(gl.arange(0, PANEL, gl.SliceLayout(0, layout)), 0)
    line_W = pair + row_W
    if GATHER:
        line_W = gl.load(token_ptr + line_W, mask=row_W < pairs, other=0)
    pointers = x_ptr + gl.expand_dims(line_W.to(gl.int64) * INPUTS, 1) + (block * BLOCK + column)
    real = gl.expand_dims(row_W < pairs, 1)
    for i in range(steps):
        here = (step + i) % STAGES
        mbarrier.wait(empty.index(here), (((step + i) // STAGES) & 1) ^ 1)
        for panel in gl.static_range(PANELS):
            mask = real & (column >= 0)
            if INPUTS % BLOCK != 0:
                mask = mask & (column + ((block + i) * BLOCK + panel * PANEL) < INPUTS)
            tile = first_rows(x.index(here * PANELS + panel), WIDTH)
            load_rows(tile, pointers + panel * PANEL, mask=mask)
        async_copy.mbarrier_arrive(full.index(here), increment_count=False)
        pointers += BLOCK


@gluon.jit
def _gatherer(
    x_ptr, token_ptr, counts, x, full, empty, at, end, expert, place, first, count,
    INPUTS: gl.constexpr, TILES: gl.constexpr, TOKENS: gl.constexpr, NARROW: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, GATHER: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Fill the ring with the pairs' rows, for all items of this program."""
    BLOCKS: gl.constexpr = (INPUTS + BLOCK - 1) // BLOCK
    if PDL:
        gdc_wait()
    step = at * 0
    while at < end:
        pair = place % ((count + (TOKENS - 1)) // TOKENS) * TOKENS
        block = at % BLOCKS
        steps = gl.minimum(BLOCKS - block, end - at)
        if count - pair <= NARROW:
            gather_rows(
                x_ptr, token_ptr, x, full, empty, step, steps, first + pair, count - pair, block,
                NARROW, INPUTS, BLOCK, STAGES, GATHER, gl.num_warps(),
            )  # fmt: skip
        else:
            gather_rows(
                x_ptr, token_ptr, x, full, empty, step, steps, first + pair, count - pair, block,
                TOKENS, INPUTS, BLOCK, STAGES, GATHER, gl.num_warps(),
            )  # fmt: skip
        step += steps
        at += steps
        expert, place, first, count = next_piece(counts, at, end, expert, place, first, count, TOKENS, TILES)


@gluon.jit
def _streamer(
    w_desc, counts, w, full, empty, at, end, expert, place, first, count,
    INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, TILES: gl.constexpr,
    TOKENS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Fill the ring with weights, for all items of this program. BYTES: of a row in a block."""
    BLOCKS: gl.constexpr = (INPUTS + BLOCK - 1) // BLOCK
    WIDE: gl.constexpr = w.shape[2]  # numbers of a row in a panel
    PANELS: gl.constexpr = BYTES * 8 // (WIDE * w.dtype.primitive_bitwidth)
    step = at * 0
    while at < end:
        row = expert * (PARTS * OUTPUTS) + place // ((count + (TOKENS - 1)) // TOKENS) * ROWS
        block = at % BLOCKS
        steps = gl.minimum(BLOCKS - block, end - at)
        for i in range(steps):
            here = (step + i) % STAGES
            mbarrier.wait(empty.index(here), (((step + i) // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(here), PARTS * ROWS * BYTES)
            for part in gl.static_range(PARTS):
                for panel in gl.static_range(PANELS):
                    tile = w.index((here * PARTS + part) * PANELS + panel)
                    corner = [row + part * OUTPUTS, ((block + i) * PANELS + panel) * WIDE]
                    load_tile(w_desc, corner, full.index(here), tile)
        step += steps
        at += steps
        expert, place, first, count = next_piece(counts, at, end, expert, place, first, count, TOKENS, TILES)


@gluon.jit
def _products(
    w, x, full, empty, step, steps,
    ROWS: gl.constexpr, PARTS: gl.constexpr, WIDTH: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Return the parts' sums, [C, W] each. A stage is given back when the products after it are under way."""
    PANELS: gl.constexpr = BLOCK // PANEL
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, WIDTH, 16])
    sums = ()
    for _ in gl.static_range(PARTS):
        sums = sums + (gl.zeros([ROWS, WIDTH], gl.float32, layout),)  # type: ignore[assignment]  # noqa: RUF005
    for i in range(steps):
        here = (step + i) % STAGES
        mbarrier.wait(full.index(here), ((step + i) // STAGES) & 1)
        fence_async_shared()  # rows that threads copied are read by the matrix units next
        grown = ()
        for part in gl.static_range(PARTS):
            sum_CW = sums[part]  # type: ignore[var-annotated]
            for panel in gl.static_range(PANELS):
                a = w.index((here * PARTS + part) * PANELS + panel)
                b = first_rows(x.index(here * PANELS + panel), WIDTH).permute((1, 0))
                sum_CW = warpgroup_mma(a, b, sum_CW, is_async=True)
            grown = grown + (sum_CW,)  # type: ignore[assignment]  # noqa: RUF005
        sums = _awaited(grown, PARTS * PANELS, PARTS)
        mbarrier.arrive(empty.index((step + i + STAGES - 1) % STAGES), count=1, pred=i > 0)
    sums = _awaited(sums, 0, PARTS)
    mbarrier.arrive(empty.index((step + steps + STAGES - 1) % STAGES), count=1)
    return sums


@gluon.jit
def _at(like, part: gl.constexpr, TOKENS: gl.constexpr):
    """Return where a part's sums lie in a program's scratch, and the pairs of the columns."""
    layout: gl.constexpr = like.type.layout
    row_C1 = gl.expand_dims(gl.arange(0, like.shape[0], gl.SliceLayout(1, layout)), 1)
    pair_1W = gl.expand_dims(gl.arange(0, like.shape[1], gl.SliceLayout(0, layout)), 0)
    return (part * TOKENS + pair_1W) * like.shape[0] + row_C1, pair_1W + row_C1 * 0


@gluon.jit
def _leave(sums, sums_ptr, flag_ptr, pairs, ROWS: gl.constexpr, PARTS: gl.constexpr, TOKENS: gl.constexpr):
    """Write the sums of a part of an item, for the program that finishes it."""
    own_ptr = sums_ptr + gl.program_id(0) * (PARTS * ROWS * TOKENS)
    for part in gl.static_range(PARTS):
        at, pair = _at(sums[part], part, TOKENS)
        gl.store(own_ptr + at, sums[part], mask=pair < pairs)
    barrier()  # until every thread's sums are written, before one thread says so
    gl.atomic_add(flag_ptr + gl.program_id(0), 1, sem="release")


@gluon.jit
def _completed(
    sums, sums_ptr, flag_ptr, pairs, done, total,
    BLOCKS: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Add the sums of the programs that have the item's other blocks, in their order. done: the item's blocks so far.

    Flags are 0 between launches.
    """
    other = gl.program_id(0)
    while done < BLOCKS:
        other += 1
        begin, end = share(other, gl.num_programs(0), total)
        left = gl.atomic_add(flag_ptr + other, 0, sem="acquire")
        while left == 0:
            left = gl.atomic_add(flag_ptr + other, 0, sem="acquire")
        gl.store(flag_ptr + other, 0)
        other_ptr = sums_ptr + other * (PARTS * ROWS * TOKENS)
        grown = ()
        for part in gl.static_range(PARTS):
            at, pair = _at(sums[part], part, TOKENS)
            more = gl.load(other_ptr + at, mask=pair < pairs, other=0, cache_modifier=".cg")
            grown = grown + (sums[part] + more,)  # type: ignore[assignment]  # noqa: RUF005
        sums = grown
        done += end - begin
    return sums


@gluon.jit
def _finish(
    w, s, x, full, empty, scale_ptr, factor_ptr, bias_ptr, y_ptr, sums_ptr, flag_ptr, step, steps, block, total,
    expert, row, pair, last,
    WIDTH: gl.constexpr, BLOCKS: gl.constexpr, OUTPUTS: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr,
    TOKENS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr, SPAN: gl.constexpr,
    SCALES: gl.constexpr, FACTOR: gl.constexpr, LIFT: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Multiply a piece of an item, and finish the item or leave the piece. last: the end of the expert's pairs."""
    WARPS: gl.constexpr = ROWS // 16
    if KIND == "":
        sums = _products(w, x, full, empty, step, steps, ROWS, PARTS, WIDTH, BLOCK, STAGES)
    else:
        LINES: gl.constexpr = (PARTS * OUTPUTS + SPAN - 1) // SPAN
        block_ptr = scale_ptr + (expert * LINES + row // SPAN) * BLOCKS + block
        sums = widened_products(
            w, s, x, full, empty, block_ptr, step, steps, ROWS, PARTS, WIDTH, STAGES, KIND, SPAN, SCALES, LIFT,
            OUTPUTS // SPAN * BLOCKS,
        )  # fmt: skip
    if block > 0:
        _leave(sums, sums_ptr, flag_ptr, last - pair, ROWS, PARTS, TOKENS)
    else:
        sums = _completed(sums, sums_ptr, flag_ptr, last - pair, steps, total, BLOCKS, ROWS, PARTS, TOKENS)
        if KIND != "":
            sums = rescaled(sums, scale_ptr, factor_ptr, expert, row, OUTPUTS, PARTS, KIND, SPAN, FACTOR, LIFT)
        own_bias_ptr = bias_ptr + expert * (PARTS * OUTPUTS)
        tall: gl.constexpr = gl.BlockedLayout([8, 1], [ROWS // 8, 256 // ROWS], [1, WARPS], [0, 1])
        _store(sums, own_bias_ptr, y_ptr, row, pair, last, OUTPUTS, BIAS, GATE, 1, tall)


@gluon.jit
def _consumer(
    w, s, x, full, empty, counts, scale_ptr, factor_ptr, bias_ptr, y_ptr, sums_ptr, flag_ptr, at, end, total, expert,
    place, first, count,
    INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, TILES: gl.constexpr,
    TOKENS: gl.constexpr, NARROW: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr,
    SPAN: gl.constexpr, SCALES: gl.constexpr, FACTOR: gl.constexpr, LIFT: gl.constexpr, BIAS: gl.constexpr,
    GATE: gl.constexpr,
):  # fmt: skip
    """Multiply and finish all pieces of this program."""
    BLOCKS: gl.constexpr = (INPUTS + BLOCK - 1) // BLOCK
    step = at * 0
    while at < end:
        units = (count + (TOKENS - 1)) // TOKENS
        pair = first + place % units * TOKENS
        row = place // units * ROWS
        block = at % BLOCKS
        steps = gl.minimum(BLOCKS - block, end - at)
        if first + count - pair <= NARROW:
            _finish(
                w, s, x, full, empty, scale_ptr, factor_ptr, bias_ptr, y_ptr, sums_ptr, flag_ptr, step, steps, block,
                total, expert, row, pair, first + count,
                NARROW, BLOCKS, OUTPUTS, ROWS, PARTS, TOKENS, BLOCK, STAGES, KIND, SPAN, SCALES,
                FACTOR, LIFT, BIAS, GATE,
            )  # fmt: skip
        else:
            _finish(
                w, s, x, full, empty, scale_ptr, factor_ptr, bias_ptr, y_ptr, sums_ptr, flag_ptr, step, steps, block,
                total, expert, row, pair, first + count,
                TOKENS, BLOCKS, OUTPUTS, ROWS, PARTS, TOKENS, BLOCK, STAGES, KIND, SPAN, SCALES,
                FACTOR, LIFT, BIAS, GATE,
            )  # fmt: skip
        step += steps
        at += steps
        expert, place, first, count = next_piece(counts, at, end, expert, place, first, count, TOKENS, TILES)


@gluon.jit
def barriers(number: gl.constexpr, count: gl.constexpr):
    """Return `number` barriers in shared memory, each of which waits for `count` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def grouped_stream_kernel(
    x_ptr, w_desc, scale_ptr, factor_ptr, bias_ptr, token_ptr, start_ptr, y_ptr, sums_ptr, flag_ptr,
    E: gl.constexpr, INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    NARROW: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
    SPAN: gl.constexpr, SCALES: gl.constexpr, FACTOR: gl.constexpr, LIFT: gl.constexpr,
    GATHER: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute y [P, O] of the pairs that some expert computes.

    GATHER: a pair's row of x is its token's; otherwise x has a row for each pair, which the kernel before may still be
        writing. Routes must then be older: of the kernels since route, each launches the next one only after it has
        seen route's end, as this kernel does when it gathers.
    GATE: "" or the activation. With one an expert's rows are O gates, then O ups.
    sums: float32 [programs, PARTS, TOKENS, ROWS].
    flag: 0 for each program.
    KIND, GROUP, SPAN, SCALES, FACTOR, LIFT: see forms.py. KIND is "" for plain weights.
    scale: of codes [E, groups, outputs], otherwise as `Fp8` has them.
    """
    PANELS: gl.constexpr = BLOCK // PANEL
    PARTS: gl.constexpr = 1 if GATE == "" else 2
    TILES: gl.constexpr = (OUTPUTS + ROWS - 1) // ROWS
    BLOCKS: gl.constexpr = (INPUTS + BLOCK - 1) // BLOCK
    BYTES: gl.constexpr = BLOCK // 2 if KIND == "e2m1" or KIND == "levels" else BLOCK * (1 if KIND == "fp8" else 2)
    SCALED: gl.constexpr = KIND == "e2m1" or KIND == "levels"
    x_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES * PANELS, TOKENS, PANEL], x_layout)
    w_shape: gl.constexpr = w_desc.block_shape
    WEIGHT_PANELS: gl.constexpr = PANELS if KIND == "" else 1
    w = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES * PARTS * WEIGHT_PANELS, w_shape[0], w_shape[1]], w_desc.layout
    )  # fmt: skip
    s = w
    if SCALED:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        GROUPS: gl.constexpr = BLOCK // GROUP if GROUP < BLOCK else 1
        s = gl.allocate_shared_memory(scale_ptr.dtype.element_ty, [STAGES * PARTS, GROUPS, ROWS], plain)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    counts = gl.allocate_shared_memory(gl.int32, [slots(E), 1], flat)
    full, empty = barriers(STAGES, 1 + 4 * 32 + (32 if SCALED else 0)), barriers(STAGES, 1)
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
    if SCALED:
        gl.warp_specialize(
            [
                (_consumer, (
                    w, s, x, full, empty, counts, scale_ptr, factor_ptr, bias_ptr, y_ptr, sums_ptr, flag_ptr, at, end,
                    total, expert, place, first, count, INPUTS, OUTPUTS, ROWS, PARTS, TILES, TOKENS, NARROW, BLOCK,
                    STAGES, KIND, SPAN, SCALES, FACTOR, LIFT, BIAS, GATE,
                )),
                (_gatherer, (
                    x_ptr, token_ptr, counts, x, full, empty, at, end, expert, place, first, count,
                    INPUTS, TILES, TOKENS, NARROW, BLOCK, STAGES, GATHER, PDL,
                )),
                (_streamer, (
                    w_desc, counts, w, full, empty, at, end, expert, place, first, count,
                    INPUTS, OUTPUTS, ROWS, PARTS, TILES, TOKENS, BLOCK, STAGES, BYTES,
                )),
                (scaler, (
                    scale_ptr, counts, s, full, empty, at, end, expert, place, first, count,
                    INPUTS, OUTPUTS, ROWS, PARTS, TILES, TOKENS, STAGES, GROUP,
                )),
            ],
            [4, 1, 1],
            [72, 40, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (
                    w, s, x, full, empty, counts, scale_ptr, factor_ptr, bias_ptr, y_ptr, sums_ptr, flag_ptr, at, end,
                    total, expert, place, first, count, INPUTS, OUTPUTS, ROWS, PARTS, TILES, TOKENS, NARROW, BLOCK,
                    STAGES, KIND, SPAN, SCALES, FACTOR, LIFT, BIAS, GATE,
                )),
                (_gatherer, (
                    x_ptr, token_ptr, counts, x, full, empty, at, end, expert, place, first, count,
                    INPUTS, TILES, TOKENS, NARROW, BLOCK, STAGES, GATHER, PDL,
                )),
                (_streamer, (
                    w_desc, counts, w, full, empty, at, end, expert, place, first, count,
                    INPUTS, OUTPUTS, ROWS, PARTS, TILES, TOKENS, BLOCK, STAGES, BYTES,
                )),
            ],
            [4, 1],
            [72, 40],
        )  # fmt: skip
