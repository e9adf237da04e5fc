"""Products of 8-bit numbers for up to a few hundred tokens on Hopper, at the memory's rate: gemm/hopper.py with scales.

Both operands are E4M3 or both are int8. As there, one warp streams weights and x into a ring of shared memory, and asks
for the first weights while the kernel before still runs; that kernel rounds the activations. The other warps multiply
and finish tiles: scales, bias, gated activation, rounding.

Hopper's matrix units keep about 14 bits of a sum of E4M3 products. With PROMOTE each 128 inputs are summed there from
zero, and the partial sums are added up in float32 registers. Scales of blocks need that in any case. Int8 is exact.

Legend:
    C  weight rows of one part, which are the outputs of a tile
    T  tokens of a tile
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.gemm.hopper import _awaited, _finished, _item, _together, _write
from ridgeline.kernels.gluon_names import barrier, barriers, load_tile, viewed

PANEL = gl.constexpr(128)  # inputs in one swizzled row of shared memory, and inputs that share a scale in blocks


@gluon.jit
def _load_tokens(x_desc, x, full, stage, token, first, tokens, PANELS: gl.constexpr):
    """Copy a stage's block of x. Boxes beyond the last token would be slow to fill with zeros; the first box is copied
    in their place."""
    layout: gl.constexpr = x_desc.layout
    BOX: gl.constexpr = x_desc.block_shape[0]
    BOXES: gl.constexpr = x.shape[1] // BOX
    for panel in gl.static_range(PANELS):
        boxes = viewed(x.index(stage * PANELS + panel), [BOXES, BOX, PANEL], layout)
        for box in gl.static_range(BOXES):
            corner = [gl.where(token + box * BOX < tokens, token + box * BOX, 0), first + panel * PANEL]
            load_tile(x_desc, corner, full.index(stage), boxes.index(box))


@gluon.jit
def _producer(
    x_desc, w_desc, x, w, full, empty, items, token_tiles, tokens, outputs, blocks,
    ROWS: gl.constexpr, PARTS: gl.constexpr, TOKENS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Fill the ring with blocks of weights and of x, for all items of this program."""
    PANELS: gl.constexpr = BLOCK // PANEL
    step = 0
    _, _, first, last = _item(gl.program_id(0), token_tiles, blocks, SPLIT)
    ahead = gl.minimum(last - first, STAGES)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, token_tile, begin, end = _item(item, token_tiles, blocks, SPLIT)
        for block in range(begin, end):
            here = step % STAGES
            mbarrier.wait(empty.index(here), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(here), (PARTS * ROWS + TOKENS) * BLOCK)
            for part in gl.static_range(PARTS):
                row = tile * ROWS + part * outputs
                for panel in gl.static_range(PANELS):
                    place = (here * PARTS + part) * PANELS + panel
                    load_tile(w_desc, [row, block * BLOCK + panel * PANEL], full.index(here), w.index(place))
            if step >= ahead:
                _load_tokens(x_desc, x, full, here, token_tile * TOKENS, block * BLOCK, tokens, PANELS)
            elif step == ahead - 1:
                if PDL:
                    gdc_wait()
                for early in range(ahead):
                    at = (begin + early) * BLOCK
                    _load_tokens(x_desc, x, full, early, token_tile * TOKENS, at, tokens, PANELS)
            step += 1


@gluon.jit
def _row_scales(w_scale_ptr, row, outputs, ROWS: gl.constexpr, PARTS: gl.constexpr, layout: gl.constexpr):
    """Return the scales of each part's outputs: [C]."""
    at_C = row + gl.arange(0, ROWS, layout)
    scales = ()
    for part in gl.static_range(PARTS):
        scale_C = gl.load(w_scale_ptr + part * outputs + at_C, mask=at_C < outputs, other=0)
        scales = scales + (scale_C,)  # type: ignore[assignment]  # noqa: RUF005
    return scales


@gluon.jit
def _products(
    w, x, full, empty, step, steps,
    ROWS: gl.constexpr, PARTS: gl.constexpr, TOKENS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    SUM: gl.constexpr,
):  # fmt: skip
    """Return (the parts' sums [C, T], the next step). A stage is given back when the products after it are
    under way."""
    PANELS: gl.constexpr = BLOCK // PANEL
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, TOKENS, 32])
    sums = ()
    for _ in gl.static_range(PARTS):
        sums = sums + (gl.zeros([ROWS, TOKENS], SUM, layout),)  # type: ignore[assignment]  # noqa: RUF005
    for i in range(steps):
        here = step % STAGES
        mbarrier.wait(full.index(here), (step // STAGES) & 1)
        grown = ()
        for part in gl.static_range(PARTS):
            sum_CT = sums[part]  # type: ignore[var-annotated]
            for panel in gl.static_range(PANELS):
                a = w.index((here * PARTS + part) * PANELS + panel)
                b = x.index(here * PANELS + panel).permute((1, 0))
                sum_CT = warpgroup_mma(a, b, sum_CT, is_async=True)
            grown = grown + (sum_CT,)  # type: ignore[assignment]  # noqa: RUF005
        sums = _awaited(grown, PARTS * PANELS, PARTS)
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=i > 0)
        step += 1
    sums = _awaited(sums, 0, PARTS)
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return sums, step


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
            scale_G = gl.load(w_scale_ptr + (row + part * outputs) // PANEL * columns + column_G)
            w_scales = w_scales + (scale_G,)  # type: ignore[assignment]  # noqa: RUF005
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
def _promoted(
    w, x, full, empty, table, step, steps,
    ROWS: gl.constexpr, PARTS: gl.constexpr, TOKENS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    GROUPED: gl.constexpr,
):  # fmt: skip
    """Return what `_products` does, with the sums of each 128 inputs added up in float32, times the factors in `table`
    if GROUPED. A stage is given back before its sums are added."""
    PANELS: gl.constexpr = BLOCK // PANEL
    GROUPS: gl.constexpr = table.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, TOKENS, 32])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    zeros_CT = gl.zeros([ROWS, TOKENS], gl.float32, layout)
    sums = ()
    for _ in gl.static_range(PARTS):
        sums = sums + (zeros_CT,)  # type: ignore[assignment]  # noqa: RUF005
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
                fresh = fresh + (warpgroup_mma(a, b, zeros_CT, use_acc=False, is_async=True),)  # type: ignore[assignment]  # noqa: RUF005
        fresh = _awaited(fresh, 0, PANELS * PARTS)
        mbarrier.arrive(empty.index(here), count=1)
        for panel in gl.static_range(PANELS):
            grown = ()
            for part in gl.static_range(PARTS):
                more_CT = fresh[panel * PARTS + part]
                if GROUPED:
                    at = part * GROUPS + i * PANELS + panel
                    more_CT = more_CT * gl.expand_dims(lines.index(at).load(gl.SliceLayout(0, layout)), 0)
                grown = grown + (sums[part] + more_CT,)  # type: ignore[assignment]  # noqa: RUF005
            sums = grown
        step += 1
    return sums, step


@gluon.jit
def _write_rounded(y, y_ptr, y_scale_ptr, row, token, tokens, outputs, AXIS: gl.constexpr, layout: gl.constexpr):
    """Round the results of a tile, whose 128 rows lie along axis 1 - AXIS, to E4M3 with a scale for each token. Larger
    quotients than 448, by a rounding, saturate."""
    largest_T = gl.max(gl.abs(y), 1 - AXIS)
    scale_T = gl.maximum(largest_T * (1 / 448), 1e-30)
    at_T = token + gl.arange(0, y.shape[AXIS], scale_T.type.layout)
    gl.store(y_scale_ptr + row // PANEL * tokens + at_T, scale_T, mask=at_T < tokens)
    _write(y * gl.expand_dims(1 / scale_T, 1 - AXIS), y_ptr, row, token, tokens, outputs, AXIS, layout)


@gluon.jit
def _consumer(
    x, w, full, empty, table, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, y_scale_ptr, sums_ptr, arrival_ptr,
    items, token_tiles, tokens, outputs, inputs, blocks,
    ROWS: gl.constexpr, PARTS: gl.constexpr, TOKENS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr, GROUPED: gl.constexpr, BLOCKED: gl.constexpr, PROMOTE: gl.constexpr, BIAS: gl.constexpr,
    GATE: gl.constexpr, ROUND: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply and finish all tiles of this program."""
    WARPS: gl.constexpr = ROWS // 16
    SUM: gl.constexpr = gl.int32 if w.dtype == gl.int8 else gl.float32
    tall: gl.constexpr = gl.BlockedLayout([8, 1], [ROWS // 8, 256 // ROWS], [1, WARPS], [0, 1])
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [128 // ROWS, ROWS // 4], [WARPS, 1], [1, 0])
    # Where a tile is finished, and which axis has its rows
    last: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 32]) if SPLIT == 1 else wide
    AXIS: gl.constexpr = 0 if SPLIT == 1 else 1
    SHARE: gl.constexpr = TOKENS // SPLIT
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, token_tile, begin, end = _item(item, token_tiles, blocks, SPLIT)
        row, token = tile * ROWS, token_tile * TOKENS
        mine = token + item % SPLIT * SHARE
        # Scales are asked for before the products, so that the end of a tile need not wait for them, and those of
        # weights while the kernel before still runs
        if not BLOCKED:
            w_scales = _row_scales(w_scale_ptr, row, outputs, ROWS, PARTS, gl.SliceLayout(1 - AXIS, last))
        if GROUPED:
            first, columns = begin * (BLOCK // PANEL), gl.cdiv(inputs, PANEL)
            _factors(
                table, x_scale_ptr, w_scale_ptr, row, token, first, tokens, outputs, columns, BLOCKED, WARPS, PDL
            )  # fmt: skip
        else:
            if PDL:
                gdc_wait()  # the kernel before writes the scales of x
            at_T = mine + gl.arange(0, SHARE, gl.SliceLayout(AXIS, last))
            x_scale_T = gl.load(x_scale_ptr + at_T, mask=at_T < tokens, other=0)
        if PROMOTE:
            sums, step = _promoted(
                w, x, full, empty, table, step, end - begin, ROWS, PARTS, TOKENS, BLOCK, STAGES, GROUPED
            )  # fmt: skip
        else:
            sums, step = _products(w, x, full, empty, step, end - begin, ROWS, PARTS, TOKENS, BLOCK, STAGES, SUM)
        if SPLIT > 1:
            sums = _together(
                _floats(sums, PARTS), sums_ptr, arrival_ptr, item // SPLIT, item % SPLIT, tokens - token,
                ROWS, PARTS, TOKENS, SPLIT, wide,
            )  # fmt: skip
        if not BLOCKED:
            sums = _scaled(sums, w_scales, PARTS, 1 - AXIS)
        if not GROUPED:
            sums = _scaled(sums, (x_scale_T,) if PARTS == 1 else (x_scale_T, x_scale_T), PARTS, AXIS)
        out: gl.constexpr = tall if SPLIT == 1 else wide
        y = _finished(sums, bias_ptr, row, outputs, BIAS, GATE, 1 - AXIS)
        if ROUND:
            _write_rounded(y, y_ptr, y_scale_ptr, row, mine, tokens, outputs, 1 - AXIS, out)
        else:
            _write(y, y_ptr, row, mine, tokens, outputs, 1 - AXIS, out)


@gluon.jit
def _floats(sums, PARTS: gl.constexpr):
    found = ()
    for part in gl.static_range(PARTS):
        found = found + (sums[part].to(gl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _scaled(sums, scales, PARTS: gl.constexpr, AXIS: gl.constexpr):
    """Return the parts' sums times each part's scales, which lie along the other axis than AXIS, in float32."""
    found = ()
    for part in gl.static_range(PARTS):
        scaled = sums[part].to(gl.float32) * gl.expand_dims(scales[part], AXIS)
        found = found + (scaled,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit(do_not_specialize=["tokens"])
def stream_kernel(
    x_desc, w_desc, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, y_scale_ptr, sums_ptr, arrival_ptr,
    tokens, outputs, inputs,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    GROUPS: gl.constexpr, BLOCKED: gl.constexpr, PROMOTE: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr,
    ROUND: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute y [T, O].

    GATE: "" or the activation. With one the weight's rows are O gates, then O ups.
    GROUPS: at least the blocks of 128 inputs of a program, if x has a scale for each; 0 if it has one for a token.
    ROUND: y is E4M3, with a scale for each token and 128 outputs; rows are 128, and outputs a multiple of it.
    x_scale: float32 [T], or [C, T] if GROUPS, with C blocks of 128 inputs.
    w_scale: float32 [O] (2 O if gated), or [blocks of 128 outputs, C] if BLOCKED, which needs GROUPS.
    y_scale: float32 [blocks of 128 outputs, T] if ROUND.
    sums: float32 [tiles, SPLIT, PARTS, TOKENS, ROWS].
    arrival: a counter per tile, a multiple of SPLIT.
    """
    if PDL:
        gdc_launch_dependents()
    PANELS: gl.constexpr = BLOCK // PANEL
    PARTS: gl.constexpr = 1 if GATE == "" else 2
    dtype: gl.constexpr = w_desc.dtype
    layout: gl.constexpr = w_desc.layout
    w = gl.allocate_shared_memory(dtype, [STAGES * PARTS * PANELS, ROWS, PANEL], layout)
    x = gl.allocate_shared_memory(dtype, [STAGES * PANELS, TOKENS, PANEL], layout)
    # What the sums of each 128 inputs are multiplied by; of the smallest size where that is nothing
    table = gl.allocate_shared_memory(
        gl.float32, [PARTS, GROUPS if GROUPS > 0 else 1, TOKENS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    full, empty = barriers(STAGES), barriers(STAGES)
    fence_async_shared()
    token_tiles = gl.cdiv(tokens, TOKENS)
    items = gl.cdiv(outputs, ROWS) * token_tiles * SPLIT
    blocks = gl.cdiv(inputs, BLOCK)
    gl.warp_specialize(
        [
            (_consumer, (
                x, w, full, empty, table, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, y_scale_ptr, sums_ptr, arrival_ptr,
                items, token_tiles, tokens, outputs, inputs, blocks, ROWS, PARTS, TOKENS, BLOCK, STAGES, SPLIT,
                GROUPS > 0, BLOCKED, PROMOTE, BIAS, GATE, ROUND, PDL,
            )),
            (_producer, (
                x_desc, w_desc, x, w, full, empty, items, token_tiles, tokens, outputs, blocks,
                ROWS, PARTS, TOKENS, BLOCK, STAGES, SPLIT, PDL,
            )),
        ],
        [1],
        [40],
    )  # fmt: skip
