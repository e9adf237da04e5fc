"""Experts' products for Hopper where the matrix units are the bound: tiles of 128 pairs by 256 weight rows, or by 128
where FP8 weights have scales of blocks.

Each of two warpgroups multiplies 64 pairs. One that has no pairs leaves the matrix units to the other. Two warps gather
the pairs' rows of x into a ring of shared memory, one copies weights (and rows that need no gathering), and one
warp draws items by ticket, so short items and long ones even out. Neighbouring items share weights, and all programs
together work on a few experts at a time, so weights and rows come from the second-level cache.

With scales of blocks the sums of each 128 inputs leave the matrix units and are added up in float32 (hopper_sums.py).
While one warpgroup adds, the other one multiplies.

Legend:
    W  pairs of a warpgroup
    C  weight rows of a tile: outputs, or as many gates as matching ups
    F  outputs of a tile
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.gemm.experts.hopper_finish import finish, lines_of, write
from ridgeline.kernels.gemm.experts.hopper_load import gather_rows
from ridgeline.kernels.gemm.experts.hopper_walk import counts_of, find_item, hear, tell
from ridgeline.kernels.hopper.finish import halves
from ridgeline.kernels.hopper.gluon_names import barriers, load_tile, viewed
from ridgeline.kernels.hopper.ring import sums_layout

PAIRS = gl.constexpr(128)  # pairs of a tile


@gluon.jit
def _scheduler(
    start_ptr, ticket_ptr, news, news_full, news_empty,
    E: gl.constexpr, TILES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Draw items, always one ahead of the other warps, and pass them on; at the end pass on an item without pairs."""
    _, _, count_S = counts_of(start_ptr, E)
    items = gl.sum((count_S + (PAIRS - 1)) // PAIRS, 0) * TILES
    item = gl.program_id(0)
    before, expert = item * 0, item * 0
    first = gl.load(start_ptr)  # not 0 where these experts are some of a layer's
    count = gl.load(start_ptr + 1) - first
    turn = item * 0
    more = True
    while more:
        before, expert, first, count = find_item(start_ptr, item, before, expert, first, count, E, PAIRS, TILES)
        more = item < items
        place = item - before
        units = gl.maximum((count + (PAIRS - 1)) // PAIRS, 1)
        pair = place % units * PAIRS
        here = turn % 2
        mbarrier.wait(news_empty.index(here), ((turn // 2) & 1) ^ 1)
        tell(news, here * 4, first + pair)
        tell(news, here * 4 + 1, gl.where(more, gl.minimum(count - pair, PAIRS), 0))
        tell(news, here * 4 + 2, expert)
        tell(news, here * 4 + 3, place // units)
        mbarrier.arrive(news_full.index(here), count=1)
        if more:
            # As many tickets are drawn as there are items; the last one makes the counter ready for the next launch.
            drawn = gl.atomic_add(ticket_ptr, 1, sem="relaxed")
            if drawn == items - 1:
                gl.store(ticket_ptr, 0)
            item = drawn + gl.num_programs(0)
        turn += 1
    if PDL:
        gdc_launch_dependents()


@gluon.jit
def _news(news, news_full, news_empty, turn):
    """Return the item of a turn: (first pair, pairs, expert, column tile). At the end it has no pairs."""
    here = turn % 2
    mbarrier.wait(news_full.index(here), (turn // 2) & 1)
    pair = hear(news, here * 4)
    pairs = hear(news, here * 4 + 1)
    expert = hear(news, here * 4 + 2)
    tile = hear(news, here * 4 + 3)
    mbarrier.arrive(news_empty.index(here), count=1)
    return pair, pairs, expert, tile


@gluon.jit
def _gatherer(
    x_ptr, token_ptr, x, full, empty, news, news_full, news_empty,
    INPUTS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the ring with the rows of every item's pairs."""
    turn = gl.program_id(0) * 0
    pair, pairs, _expert, _tile = _news(news, news_full, news_empty, turn)
    while pairs > 0:
        gather_rows(
            x_ptr, token_ptr, x, x, x, full, empty, x_ptr, x_ptr, 0, turn * BLOCKS, BLOCKS, pair, pairs, 0, 0,
            PAIRS, INPUTS, 0, 1, x.shape[2], STAGES, True, "", False, gl.num_warps(),
        )  # fmt: skip
        turn += 1
        pair, pairs, _expert, _tile = _news(news, news_full, news_empty, turn)


@gluon.jit
def _loader(
    x_desc, w_desc, x, w, full, empty, news, news_full, news_empty,
    OUTPUTS: gl.constexpr, PARTS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """Fill the ring with the weights of every item, and with its pairs' rows if these lie together."""
    x_layout: gl.constexpr = x_desc.layout
    w_layout: gl.constexpr = w_desc.layout
    ROWS: gl.constexpr = w.shape[1]
    HALF: gl.constexpr = ROWS // 2
    PANEL: gl.constexpr = w.shape[2]
    BYTES: gl.constexpr = PANEL * w.dtype.primitive_bitwidth // 8
    turn = gl.program_id(0) * 0
    pair, pairs, expert, tile = _news(news, news_full, news_empty, turn)
    while pairs > 0:
        row = expert * (PARTS * OUTPUTS) + tile * (ROWS // PARTS)
        for block in range(BLOCKS):
            step = turn * BLOCKS + block
            here = step % STAGES
            mbarrier.wait(empty.index(here), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(here), (ROWS + (0 if GATHER else PAIRS)) * BYTES)
            halves = viewed(w.index(here), [2, HALF, PANEL], w_layout)
            for half in gl.static_range(2):
                corner = [row + half * (OUTPUTS if PARTS == 2 else HALF), block * PANEL]
                load_tile(w_desc, corner, full.index(here), halves.index(half))
            if not GATHER:
                boxes = viewed(x.index(here), [1, PAIRS, PANEL], x_layout)
                load_tile(x_desc, [pair, block * PANEL], full.index(here), boxes.index(0))
        turn += 1
        pair, pairs, expert, tile = _news(news, news_full, news_empty, turn)


@gluon.jit
def _products(
    x, w, full, empty, step, PART: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, GATHER: gl.constexpr
):  # fmt: skip
    """Return the sums of 64 pairs. A stage is given back when the products after it are under way."""
    x_layout: gl.constexpr = x.type.layout
    PANEL: gl.constexpr = x.shape[2]
    ROWS: gl.constexpr = w.shape[1]
    layout: gl.constexpr = sums_layout(64, ROWS, w.dtype.primitive_bitwidth)
    sum_WC = gl.zeros([64, ROWS], gl.float32, layout)
    for block in range(BLOCKS):
        here = (step + block) % STAGES
        mbarrier.wait(full.index(here), ((step + block) // STAGES) & 1)
        if GATHER:
            fence_async_shared()  # rows that threads copied are read by the matrix units next
        a = viewed(x.index(here), [2, 64, PANEL], x_layout).index(PART)
        sum_WC = warpgroup_mma(a, w.index(here).permute((1, 0)), sum_WC, is_async=True)
        sum_WC = warpgroup_mma_wait(1, deps=(sum_WC,))
        mbarrier.arrive(empty.index((step + block + STAGES - 1) % STAGES), count=1, pred=block > 0)
    sum_WC = warpgroup_mma_wait(0, deps=(sum_WC,))
    mbarrier.arrive(empty.index((step + BLOCKS + STAGES - 1) % STAGES), count=1)
    return sum_WC


@gluon.jit
def _promoted(
    x, w, full, empty, step, scale_ptr, x_scale_ptr, token_ptr, x_rows, pair, pairs, row,
    PART: gl.constexpr, OUTPUTS: gl.constexpr, PARTS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    GATHER: gl.constexpr,
):  # fmt: skip
    """Return the sums of 64 pairs, in halves of a tile's rows. A block has 128 inputs, and its sums are scaled. Scales
    are asked for one block ahead. scale: the expert's. row: the tile's first output."""
    x_layout: gl.constexpr = x.type.layout
    PANEL: gl.constexpr = x.shape[2]
    HALF: gl.constexpr = w.shape[1] // 2
    LINES: gl.constexpr = (PARTS * OUTPUTS + 127) // 128
    layout: gl.constexpr = sums_layout(64, 2 * HALF, w.dtype.primitive_bitwidth)
    zeros = gl.zeros([64, 2 * HALF], gl.float32, layout)
    low_WC, high_WC = halves(zeros)
    line_W, real_W = lines_of(token_ptr, pair, pairs, gl.SliceLayout(1, low_WC.type.layout), GATHER)
    x_scale_ptr += line_W
    low_ptr = scale_ptr + row // 128 * BLOCKS
    high_ptr = scale_ptr + gl.minimum((row + (OUTPUTS if PARTS == 2 else HALF)) // 128, LINES - 1) * BLOCKS
    x_W = gl.load(x_scale_ptr, mask=real_W, other=0)
    low, high = gl.load(low_ptr), gl.load(high_ptr)
    for block in range(BLOCKS):
        here = (step + block) % STAGES
        low_W1, high_W1 = gl.expand_dims(x_W * low, 1), gl.expand_dims(x_W * high, 1)
        ahead = gl.minimum(block + 1, BLOCKS - 1)
        x_W = gl.load(x_scale_ptr + ahead * x_rows, mask=real_W, other=0)
        low, high = gl.load(low_ptr + ahead), gl.load(high_ptr + ahead)
        mbarrier.wait(full.index(here), ((step + block) // STAGES) & 1)
        if GATHER:
            fence_async_shared()
        a = viewed(x.index(here), [2, 64, PANEL], x_layout).index(PART)
        more = warpgroup_mma(a, w.index(here).permute((1, 0)), zeros, use_acc=False, is_async=True)
        more = warpgroup_mma_wait(0, deps=(more,))
        mbarrier.arrive(empty.index(here), count=1)
        more_low_WC, more_high_WC = halves(more)
        low_WC += more_low_WC * low_W1
        high_WC += more_high_WC * high_W1
    return low_WC, high_WC


@gluon.jit
def _consumer(
    x, w, full, empty, news, news_full, news_empty, scale_ptr, x_scale_ptr, token_ptr, x_rows, bias_ptr, y_ptr,
    PART: gl.constexpr, OUTPUTS: gl.constexpr, PARTS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    KIND: gl.constexpr, SPAN: gl.constexpr, GATHER: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Multiply 64 pairs of every item, and finish them."""
    ROWS: gl.constexpr = w.shape[1]
    HEIGHT: gl.constexpr = PARTS * OUTPUTS
    turn = gl.program_id(0) * 0
    pair, pairs, expert, tile = _news(news, news_full, news_empty, turn)
    while pairs > 0:
        step = turn * BLOCKS
        if pairs > PART * 64:
            column = tile * (ROWS // PARTS)
            own_bias_ptr = bias_ptr + expert * HEIGHT
            own_pair, own_pairs = pair + PART * 64, pairs - PART * 64
            if KIND == "fp8" and SPAN > 1:
                low_WC, high_WC = _promoted(
                    x, w, full, empty, step, scale_ptr + expert * ((HEIGHT + 127) // 128 * BLOCKS), x_scale_ptr,
                    token_ptr, x_rows, own_pair, own_pairs, column, PART, OUTPUTS, PARTS, BLOCKS, STAGES, GATHER,
                )  # fmt: skip
                write(low_WC, high_WC, own_bias_ptr, y_ptr, own_pair, own_pairs, column, OUTPUTS, BIAS, GATE)
                if GATE == "":
                    write(
                        high_WC, high_WC, own_bias_ptr, y_ptr, own_pair, own_pairs, column + ROWS // 2, OUTPUTS, BIAS,
                        GATE,
                    )  # fmt: skip
            else:
                sum_WC = _products(x, w, full, empty, step, PART, BLOCKS, STAGES, GATHER)
                finish(
                    sum_WC, scale_ptr + expert * HEIGHT, x_scale_ptr, token_ptr, own_bias_ptr, y_ptr, own_pair,
                    own_pairs, column, OUTPUTS, KIND == "fp8", GATHER, BIAS, GATE,
                )  # fmt: skip
        else:
            # Nothing to multiply here. A stage may be given back only once it has been filled, or turns would mix.
            for block in range(BLOCKS):
                here = (step + block) % STAGES
                mbarrier.wait(full.index(here), ((step + block) // STAGES) & 1)
                mbarrier.arrive(empty.index(here), count=1)
        turn += 1
        pair, pairs, expert, tile = _news(news, news_full, news_empty, turn)


@gluon.jit(do_not_specialize=["x_rows"])
def grouped_tiles_kernel(
    x_ptr, x_desc, w_desc, scale_ptr, x_scale_ptr, bias_ptr, token_ptr, start_ptr, y_ptr, ticket_ptr, x_rows,
    E: gl.constexpr, INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    KIND: gl.constexpr, SPAN: gl.constexpr, GATHER: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Compute y [P, O] of the pairs that some expert computes, by programs that draw items by ticket.

    ROWS: weight rows of a tile.
    KIND, SPAN, scale, x_scale: see hopper_stream.py; KIND is not "e2m1".
    GATHER: a pair's row of x is its token's; otherwise x has a row for each pair.
    GATE: "" or the activation. With one an expert's rows are O gates, then O ups.
    ticket: 0.
    """
    PARTS: gl.constexpr = 1 if GATE == "" else 2
    PANEL: gl.constexpr = w_desc.block_shape[1]
    BLOCKS: gl.constexpr = (INPUTS + PANEL - 1) // PANEL
    TILES: gl.constexpr = (OUTPUTS + ROWS // PARTS - 1) // (ROWS // PARTS)
    dtype: gl.constexpr = w_desc.dtype
    layout: gl.constexpr = w_desc.layout
    x = gl.allocate_shared_memory(dtype, [STAGES, PAIRS, PANEL], layout)
    w = gl.allocate_shared_memory(dtype, [STAGES, ROWS, PANEL], layout)
    news = gl.allocate_shared_memory(gl.int32, [8, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, empty = barriers(STAGES, 1 + (2 * 32 if GATHER else 0)), barriers(STAGES, 2)
    news_full, news_empty = barriers(2, 1), barriers(2, 4 if GATHER else 3)
    fence_async_shared()
    if PDL:
        gdc_wait()
    if GATHER:
        gl.warp_specialize(
            [
                (_consumer, (
                    x, w, full, empty, news, news_full, news_empty, scale_ptr, x_scale_ptr, token_ptr, x_rows,
                    bias_ptr, y_ptr, 0, OUTPUTS, PARTS, BLOCKS, STAGES, KIND, SPAN, GATHER, BIAS, GATE,
                )),
                (_consumer, (
                    x, w, full, empty, news, news_full, news_empty, scale_ptr, x_scale_ptr, token_ptr, x_rows,
                    bias_ptr, y_ptr, 1, OUTPUTS, PARTS, BLOCKS, STAGES, KIND, SPAN, GATHER, BIAS, GATE,
                )),
                (_gatherer, (
                    x_ptr, token_ptr, x, full, empty, news, news_full, news_empty, INPUTS, BLOCKS, STAGES,
                )),
                (_loader, (
                    x_desc, w_desc, x, w, full, empty, news, news_full, news_empty,
                    OUTPUTS, PARTS, BLOCKS, STAGES, GATHER,
                )),
                (_scheduler, (start_ptr, ticket_ptr, news, news_full, news_empty, E, TILES, PDL)),
            ],
            [4, 2, 1, 1],
            [208, 88, 88, 88],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (
                    x, w, full, empty, news, news_full, news_empty, scale_ptr, x_scale_ptr, token_ptr, x_rows,
                    bias_ptr, y_ptr, 0, OUTPUTS, PARTS, BLOCKS, STAGES, KIND, SPAN, GATHER, BIAS, GATE,
                )),
                (_consumer, (
                    x, w, full, empty, news, news_full, news_empty, scale_ptr, x_scale_ptr, token_ptr, x_rows,
                    bias_ptr, y_ptr, 1, OUTPUTS, PARTS, BLOCKS, STAGES, KIND, SPAN, GATHER, BIAS, GATE,
                )),
                (_loader, (
                    x_desc, w_desc, x, w, full, empty, news, news_full, news_empty,
                    OUTPUTS, PARTS, BLOCKS, STAGES, GATHER,
                )),
                (_scheduler, (start_ptr, ticket_ptr, news, news_full, news_empty, E, TILES, PDL)),
            ],
            [4, 1, 1],
            [232, 40, 40],
        )  # fmt: skip
