"""Experts' products for Hopper where the matrix units are the bound: tiles of 128 pairs by 256 weight rows.

Each of two warpgroups multiplies 64 pairs. One that has no pairs leaves the matrix units to the other. Two warps gather
the pairs' rows of x into a ring of shared memory, one copies weights (and rows that need no gathering), and one
warp draws items by ticket, so short items and long ones even out. Neighbouring items share weights, and all programs
together work on a few experts at a time, so weights and rows come from the second-level cache.

Legend:
    W  pairs of a warpgroup
    C  weight rows of a tile: 256 outputs, or 128 gates and the matching 128 ups
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

from ridgeline.kernels.activation.triton import gated
from ridgeline.kernels.gemm.hopper import PANEL
from ridgeline.kernels.gluon_names import load_tile, viewed
from ridgeline.kernels.grouped_gemm.hopper_stream import barriers, gather_rows
from ridgeline.kernels.grouped_gemm.hopper_walk import counts_of, find_item, hear, tell

PAIRS = gl.constexpr(128)  # pairs of a tile
ROWS = gl.constexpr(256)  # weight rows of a tile


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
            x_ptr, token_ptr, x, full, empty, turn * BLOCKS, BLOCKS, pair, pairs, 0,
            PAIRS, INPUTS, PANEL, STAGES, True, gl.num_warps(),
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
    HALF: gl.constexpr = ROWS // 2
    turn = gl.program_id(0) * 0
    pair, pairs, expert, tile = _news(news, news_full, news_empty, turn)
    while pairs > 0:
        row = expert * (PARTS * OUTPUTS) + tile * (ROWS // PARTS)
        for block in range(BLOCKS):
            step = turn * BLOCKS + block
            here = step % STAGES
            mbarrier.wait(empty.index(here), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(here), (ROWS + (0 if GATHER else PAIRS)) * PANEL * 2)
            halves = viewed(w.index(here), [2, HALF, PANEL], w_layout)
            for half in gl.static_range(2):
                corner = [row + half * (OUTPUTS if PARTS == 2 else HALF), block * PANEL]
                load_tile(w_desc, corner, full.index(here), halves.index(half))
            if not GATHER:
                boxes = viewed(x.index(here), [1, PAIRS, PANEL], x_layout)
                load_tile(x_desc, [pair, block * PANEL], full.index(here), boxes.index(0))
        turn += 1
        pair, pairs, expert, tile = _news(news, news_full, news_empty, turn)


@gluon.constexpr_function
def _wide(columns):
    """Return a layout with 8 neighbouring columns in a thread, so that they are stored at once. Rows stay in the warp
    in which products leave them."""
    return gl.DistributedLinearLayout(
        reg_bases=[
            [0, 1], [0, 2], [0, 4], [8, 0], *([0, 32 << i] for i in range((int(columns) // 32).bit_length() - 1))
        ],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, int(columns)],
    )  # fmt: skip


@gluon.jit
def _biased(value, bias_ptr, column, OUTPUTS: gl.constexpr):
    """Add the bias of the columns from `column` on."""
    at = column + gl.arange(0, value.shape[1], gl.SliceLayout(0, value.type.layout))
    return value + gl.expand_dims(gl.load(bias_ptr + at, mask=at < OUTPUTS, other=0).to(gl.float32), 0)


@gluon.jit
def _write(
    sum_WC, bias_ptr, y_ptr, pair, pairs, column,
    OUTPUTS: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Finish a warpgroup's part of a tile: bias, activation, rounding, and the rows of real pairs to memory."""
    if GATE != "":
        gate_WF, up_WF = sum_WC.reshape([64, 2, ROWS // 2]).permute((0, 2, 1)).split()
        if BIAS:
            gate_WF = _biased(gate_WF, bias_ptr, column, OUTPUTS)
            up_WF = _biased(up_WF, bias_ptr + OUTPUTS, column, OUTPUTS)
        y_WF = gated(gate_WF, up_WF, GATE)
    else:
        y_WF = sum_WC
        if BIAS:
            y_WF = _biased(y_WF, bias_ptr, column, OUTPUTS)
    layout: gl.constexpr = _wide(y_WF.shape[1])
    y_WF = gl.convert_layout(y_WF.to(y_ptr.dtype.element_ty), layout)
    row_W1 = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
    column_1F = gl.expand_dims(column + gl.arange(0, y_WF.shape[1], gl.SliceLayout(0, layout)), 0)
    pointers = y_ptr + (pair + row_W1).to(gl.int64) * OUTPUTS + column_1F
    gl.store(pointers, y_WF, mask=(row_W1 < pairs) & (column_1F < OUTPUTS))


@gluon.jit
def _consumer(
    x, w, full, empty, news, news_full, news_empty, bias_ptr, y_ptr, PART: gl.constexpr,
    OUTPUTS: gl.constexpr, PARTS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, GATHER: gl.constexpr,
    BIAS: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Multiply 64 pairs of every item, and finish them."""
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    x_layout: gl.constexpr = x.type.layout
    turn = gl.program_id(0) * 0
    pair, pairs, expert, tile = _news(news, news_full, news_empty, turn)
    while pairs > 0:
        step = turn * BLOCKS
        if pairs > PART * 64:
            sum_WC = gl.zeros([64, ROWS], gl.float32, acc_layout)
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
            column = tile * (ROWS // PARTS)
            own_bias_ptr = bias_ptr + expert * (PARTS * OUTPUTS)
            _write(
                sum_WC, own_bias_ptr, y_ptr, pair + PART * 64, pairs - PART * 64, column, OUTPUTS, BIAS, GATE
            )  # fmt: skip
        else:
            # Nothing to multiply here. A stage may be given back only once it has been filled, or turns would mix.
            for block in range(BLOCKS):
                here = (step + block) % STAGES
                mbarrier.wait(full.index(here), ((step + block) // STAGES) & 1)
                mbarrier.arrive(empty.index(here), count=1)
        turn += 1
        pair, pairs, expert, tile = _news(news, news_full, news_empty, turn)


@gluon.jit
def grouped_tiles_kernel(
    x_ptr, x_desc, w_desc, bias_ptr, token_ptr, start_ptr, y_ptr, ticket_ptr,
    E: gl.constexpr, INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, STAGES: gl.constexpr, GATHER: gl.constexpr,
    BIAS: gl.constexpr, GATE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute y [P, O] of the pairs that some expert computes, by programs that draw items by ticket.

    GATHER: a pair's row of x is its token's; otherwise x has a row for each pair.
    GATE: "" or the activation. With one an expert's rows are O gates, then O ups.
    ticket: 0.
    """
    PARTS: gl.constexpr = 1 if GATE == "" else 2
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
                    x, w, full, empty, news, news_full, news_empty, bias_ptr, y_ptr, 0,
                    OUTPUTS, PARTS, BLOCKS, STAGES, GATHER, BIAS, GATE,
                )),
                (_consumer, (
                    x, w, full, empty, news, news_full, news_empty, bias_ptr, y_ptr, 1,
                    OUTPUTS, PARTS, BLOCKS, STAGES, GATHER, BIAS, GATE,
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
                    x, w, full, empty, news, news_full, news_empty, bias_ptr, y_ptr, 0,
                    OUTPUTS, PARTS, BLOCKS, STAGES, GATHER, BIAS, GATE,
                )),
                (_consumer, (
                    x, w, full, empty, news, news_full, news_empty, bias_ptr, y_ptr, 1,
                    OUTPUTS, PARTS, BLOCKS, STAGES, GATHER, BIAS, GATE,
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
