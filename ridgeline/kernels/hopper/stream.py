"""Products of up to a few hundred tokens on Hopper, at the memory's rate: bulk copies, warpgroup MMA, PDL.

Weights are the left operand of the matrix units, and tokens are the columns. One producer warp of a program streams
blocks of weights and of x into a deep ring of shared memory (ring.py). It asks for the first weights while the
kernel before still runs, since weights are never written. All other warps multiply and finish the tile: scales, bias,
gated activation, rounding (finish.py).

A tile is ROWS weight rows, 16 for each warp. A gated pair's tile has two parts: so many gate rows, and the matching up
rows. If tiles are few, SPLIT programs share the inputs of one. Each writes its float32 sums and counts its arrival. The
last to arrive adds all of them up in a fixed order, so the result does not depend on which one that was, and finishes
the tile. No program waits for another, so they need not fit on the device at once.

Both operands are numbers of 16 bits, or both are E4M3, or both int8; those of 8 bits have scales, and the kernel before
has rounded x. Hopper's matrix units keep about 14 bits of a sum of E4M3 products. With PROMOTE each 128 inputs are
summed there from zero, and the partial sums are added up in float32 registers. Scales of blocks need that in any case.
Int8 is exact.

Legend:
    C  weight rows of one part, which are the outputs of a tile
    T  tokens of a tile
"""

# mypy: disable-error-code="assignment, var-annotated"
# ruff: noqa: RUF005 - Gluon knows no starred tuples
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.hopper.finish import added, arrives_last, finished, tall, write, write_rounded
from ridgeline.kernels.hopper.gluon_names import barrier, barriers, viewed
from ridgeline.kernels.hopper.ring import allocated, awaited, item_of, producer, products, sums_layout, zeros

GROUP = gl.constexpr(128)  # inputs that share a scale in blocks, and a panel of 8-bit numbers


@gluon.jit
def _row_scales(w_scale_ptr, row, outputs, ROWS: gl.constexpr, PARTS: gl.constexpr, layout: gl.constexpr):
    """Return the scales of each part's outputs: [C]."""
    at_C = row + gl.arange(0, ROWS, layout)
    scales = ()
    for part in gl.static_range(PARTS):
        scale_C = gl.load(w_scale_ptr + part * outputs + at_C, mask=at_C < outputs, other=0)
        scales = scales + (scale_C,)
    return scales


@gluon.jit
def _factors(
    table, x_scale_ptr, w_scale_ptr, row, token, first, tokens, outputs, columns,
    BLOCKED: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Write what the sums of each 128 inputs are multiplied by into shared memory: [PARTS, G, T], with G blocks of
    inputs from the `first` one on.

    All of them are asked for at once, beside the first x, as no block's products take as long as a scale to arrive.
    """
    PARTS: gl.constexpr = table.shape[0]
    GROUPS: gl.constexpr = table.shape[1]
    TOKENS: gl.constexpr = table.shape[2]
    WIDE: gl.constexpr = 32 if TOKENS > 32 else TOKENS
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // WIDE, WIDE], [WARPS, 1], [1, 0])
    column_G = gl.minimum(first + gl.arange(0, GROUPS, gl.SliceLayout(1, layout)), columns - 1)
    w_scales = ()
    if BLOCKED:
        for part in gl.static_range(PARTS):
            scale_G = gl.load(w_scale_ptr + (row + part * outputs) // GROUP * columns + column_G)
            w_scales = w_scales + (scale_G,)
    if PDL:
        gdc_wait()  # the kernel before writes the scales of x
    at_1T = gl.expand_dims(token + gl.arange(0, TOKENS, gl.SliceLayout(0, layout)), 0)
    column_G1 = gl.expand_dims(column_G, 1)
    factor_GT = gl.load(x_scale_ptr + column_G1 * tokens + at_1T, mask=(at_1T < tokens) & (column_G1 >= 0), other=0)
    barrier()  # until every thread has done with the last tile's
    for part in gl.static_range(PARTS):
        if BLOCKED:
            table.index(part).store(factor_GT * gl.expand_dims(w_scales[part], 1))
        else:
            table.index(part).store(factor_GT)
    barrier()


@gluon.jit
def _promoted(ring, table, step, steps, PARTS: gl.constexpr, GROUPED: gl.constexpr):
    """Return the sums of `products`, with the sums of each 128 inputs added up in float32, times the factors in `table`
    if GROUPED. A stage is given back before its sums are added."""
    w, x, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    PANELS: gl.constexpr = x.shape[0] // STAGES
    TOKENS: gl.constexpr = x.shape[1]
    GROUPS: gl.constexpr = table.shape[1]
    layout: gl.constexpr = sums_layout(w.shape[1], TOKENS, 8)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    sums = zeros(w.shape[1], TOKENS, PARTS, layout, gl.float32)
    zeros_CT = sums[0]
    if GROUPED:
        lines = viewed(table, [PARTS * GROUPS, TOKENS], line)
    for i in range(steps):
        here = step % STAGES
        mbarrier.wait(full.index(here), (step // STAGES) & 1)
        fresh = ()
        for panel in gl.static_range(PANELS):
            b = x.index(here * PANELS + panel).permute((1, 0))
            for part in gl.static_range(PARTS):
                a = w.index((here * PARTS + part) * PANELS + panel)
                fresh = fresh + (warpgroup_mma(a, b, zeros_CT, use_acc=False, is_async=True),)
        fresh = awaited(fresh, 0, PANELS * PARTS)
        mbarrier.arrive(empty.index(here), count=1)
        for panel in gl.static_range(PANELS):
            grown = ()
            for part in gl.static_range(PARTS):
                more_CT = fresh[panel * PARTS + part]
                if GROUPED:
                    at = part * GROUPS + i * PANELS + panel
                    more_CT = more_CT * gl.expand_dims(lines.index(at).load(gl.SliceLayout(0, layout)), 0)
                grown = grown + (sums[part] + more_CT,)
            sums = grown
        step += 1
    return sums, step


@gluon.jit
def _scaled(sums, scales, PARTS: gl.constexpr, AXIS: gl.constexpr):
    """Return the parts' sums times each part's scales, which lie along the other axis than AXIS, in float32."""
    found = ()
    for part in gl.static_range(PARTS):
        found = found + (sums[part].to(gl.float32) * gl.expand_dims(scales[part], AXIS),)
    return found


@gluon.jit
def _floats(sums, PARTS: gl.constexpr):
    found = ()
    for part in gl.static_range(PARTS):
        found = found + (sums[part].to(gl.float32),)
    return found


@gluon.jit
def _consumer(
    ring, table, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, y_scale_ptr, sums_ptr, arrival_ptr,
    items, token_tiles, tokens, outputs, inputs, blocks,
    PARTS: gl.constexpr, SPLIT: gl.constexpr, SCALED: gl.constexpr, GROUPED: gl.constexpr, BLOCKED: gl.constexpr,
    PROMOTE: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr, ROUND: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply and finish all tiles of this program."""
    w, x, full, _ = ring
    ROWS: gl.constexpr = w.shape[1]
    TOKENS: gl.constexpr = x.shape[1]
    WARPS: gl.constexpr = ROWS // 16
    BLOCK: gl.constexpr = x.shape[0] // full.shape[0] * x.shape[2]
    last: gl.constexpr = sums_layout(ROWS, TOKENS, w.dtype.primitive_bitwidth)
    step, stop, stride = 0, items, gl.num_programs(0)
    if SPLIT > 1:  # there is a program for every item, so nothing of a next one takes registers at an item's end
        stop, stride = gl.program_id(0) + 1, 1
    for item in range(gl.program_id(0), stop, stride):
        tile, token_tile, begin, end = item_of(item, token_tiles, blocks, SPLIT)
        if SCALED:
            # Scales are asked for before the products, so that the end of a tile need not wait for them, and those of
            # weights while the kernel before still runs
            row, token = tile * ROWS, token_tile * TOKENS
            if not BLOCKED:
                w_scales = _row_scales(w_scale_ptr, row, outputs, ROWS, PARTS, gl.SliceLayout(1, last))
            if GROUPED:
                first, columns = begin * (BLOCK // GROUP), gl.cdiv(inputs, GROUP)
                _factors(
                    table, x_scale_ptr, w_scale_ptr, row, token, first, tokens, outputs, columns, BLOCKED, WARPS, PDL
                )  # fmt: skip
            else:
                if PDL:
                    gdc_wait()  # the kernel before writes the scales of x
                at_T = token + gl.arange(0, TOKENS, gl.SliceLayout(0, last))
                x_scale_T = gl.load(x_scale_ptr + at_T, mask=at_T < tokens, other=0)
        if PROMOTE:
            sums, step = _promoted(ring, table, step, end - begin, PARTS, GROUPED)
        else:
            sums, step = products(ring, step, end - begin, PARTS)
        if not SCALED:  # addresses take no registers beside the products
            row, token = tile * ROWS, token_tile * TOKENS
        mine = True
        if SPLIT > 1:
            sums = _floats(sums, PARTS)
            place, part = item // SPLIT, item % SPLIT
            mine = arrives_last(sums, sums_ptr, arrival_ptr, place, part, tokens - token, WARPS, SPLIT)
        if mine:
            whole = sums
            if SPLIT > 1:
                whole = added(sums, sums_ptr, place, part, tokens - token, WARPS, SPLIT)
            if SCALED and not BLOCKED:
                whole = _scaled(whole, w_scales, PARTS, 1)
            if SCALED and not GROUPED:
                whole = _scaled(whole, (x_scale_T,) if PARTS == 1 else (x_scale_T, x_scale_T), PARTS, 0)
            y_CT = finished(whole, bias_ptr, row, outputs, BIAS, GATE)
            if ROUND:
                write_rounded(y_CT, y_ptr, y_scale_ptr, row, token, tokens, outputs, tall(ROWS, WARPS))
            else:
                write(y_CT, y_ptr, row, token, tokens, outputs, tall(ROWS, WARPS))


@gluon.jit
def stream(
    x_desc, w_desc, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, y_scale_ptr, sums_ptr, arrival_ptr,
    tokens, outputs, inputs,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    SCALED: gl.constexpr, GROUPS: gl.constexpr, BLOCKED: gl.constexpr, PROMOTE: gl.constexpr, BIAS: gl.constexpr,
    GATE: gl.constexpr, ROUND: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute y [T, O].

    GATE: "" or the activation. With one the weight's rows are O gates, then O ups.
    SCALED: there are scales, of x and of weights.
    GROUPS: at least the blocks of 128 inputs of a program, if x has a scale for each; 0 if it has one for a token.
    ROUND: y is E4M3, with a scale for each token and 128 outputs; rows are 128, and outputs a multiple of it.
    x_scale: float32 [T], or [C, T] if GROUPS, with C blocks of 128 inputs.
    w_scale: float32 [O] (2 O if gated), or [blocks of 128 outputs, C] if BLOCKED, which needs GROUPS.
    y_scale: float32 [blocks of 128 outputs, T] if ROUND.
    sums: float32 [tiles, SPLIT, PARTS, ROWS * TOKENS].
    arrival: a counter per tile, 0 between launches.
    With a SPLIT there is a program for every item.
    """
    if PDL:
        gdc_launch_dependents()
    PARTS: gl.constexpr = 1 if GATE == "" else 2
    w, x = allocated(x_desc, w_desc, ROWS, TOKENS, BLOCK, PARTS, STAGES)
    table = 0
    if SCALED:  # what the sums of each 128 inputs are multiplied by; of the smallest size where that is nothing
        table = gl.allocate_shared_memory(
            gl.float32, [PARTS, GROUPS if GROUPS > 0 else 1, TOKENS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
    ring = (w, x, barriers(STAGES), barriers(STAGES))
    fence_async_shared()
    token_tiles = gl.cdiv(tokens, TOKENS)
    items = gl.cdiv(outputs, ROWS) * token_tiles * SPLIT
    blocks = gl.cdiv(inputs, BLOCK)
    gl.warp_specialize(
        [
            (_consumer, (
                ring, table, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, y_scale_ptr, sums_ptr, arrival_ptr,
                items, token_tiles, tokens, outputs, inputs, blocks,
                PARTS, SPLIT, SCALED, GROUPS > 0, BLOCKED, PROMOTE, BIAS, GATE, ROUND, PDL,
            )),
            (producer, (x_desc, w_desc, ring, items, token_tiles, tokens, outputs, blocks, PARTS, SPLIT, PDL)),
        ],
        [1],
        [40],
    )  # fmt: skip
