"""The producers of the ring of shared memory of hopper_stream.py: rows of x and scales by four warps, weights by one.

Legend:
    W  pairs of a tile
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier
from triton.language.extra.cuda import gdc_wait

from ridgeline.kernels.gemm.experts.hopper_sums import first_rows
from ridgeline.kernels.gemm.experts.hopper_walk import next_piece
from ridgeline.kernels.hopper.gluon_names import load_rows, load_tile, viewed


@gluon.jit
def gather_rows(
    x_ptr, token_ptr, x, s, z, full, empty, beside_ptr, zero_ptr, x_rows, step, steps, pair, pairs, block, row,
    WIDTH: gl.constexpr, INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, PARTS: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, GATHER: gl.constexpr, BESIDE: gl.constexpr, ZEROS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Copy blocks of the rows of up to WIDTH pairs into the ring, as `steps` stages from `step` on. Rows behind the
    last pair, and columns behind the last input, become zeros.

    BESIDE: what scales come along: "" for none; "rows" for those of the rows of x, of each panel; "codes" for those of
        the first block's weights, from `beside_ptr` on, and with ZEROS their zeros, from `zero_ptr` on.
    row: the first one of the weights among a part's.
    """
    PANEL: gl.constexpr = x.shape[2]
    PANELS: gl.constexpr = BLOCK // PANEL
    layout: gl.constexpr = gl.BlockedLayout([1, PANEL // 8], [4, 8], [WARPS, 1], [1, 0])
    row_W = gl.arange(0, WIDTH, gl.SliceLayout(1, layout))
    column = gl.expand_dims(gl.arange(0, PANEL, gl.SliceLayout(0, layout)), 0)
    line_W = pair + row_W
    if GATHER:
        line_W = gl.load(token_ptr + line_W, mask=row_W < pairs, other=0)
    pointers = x_ptr + gl.expand_dims(line_W.to(gl.int64) * INPUTS, 1) + (block * BLOCK + column)
    real = gl.expand_dims(row_W < pairs, 1)
    if BESIDE == "rows":
        single: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        scaled_W = gl.arange(0, WIDTH, single)
        scale_W = pair + scaled_W
        if GATHER:
            scale_W = gl.load(token_ptr + scale_W, mask=scaled_W < pairs, other=0)
        scale_pointers = beside_ptr + scale_W
    for i in range(steps):
        here = (step + i) % STAGES
        mbarrier.wait(empty.index(here), (((step + i) // STAGES) & 1) ^ 1)
        for panel in gl.static_range(PANELS):
            mask = real & (column >= 0)
            if INPUTS % BLOCK != 0:
                mask = mask & (column + ((block + i) * BLOCK + panel * PANEL) < INPUTS)
            tile = first_rows(x.index(here * PANELS + panel), WIDTH)
            load_rows(tile, pointers + panel * PANEL, mask=mask)
            if BESIDE == "rows":
                at = (block + i) * PANELS + panel
                known = scaled_W < pairs
                if INPUTS % BLOCK != 0:
                    known = known & (at * PANEL + scaled_W * 0 < INPUTS)
                load_rows(s.index(here * PANELS + panel).slice(0, WIDTH), scale_pointers + at * x_rows, mask=known)
        if BESIDE == "codes":
            _code_scales(beside_ptr, s, here, block + i, row, PARTS, INPUTS, OUTPUTS, WARPS)
            if ZEROS:
                _code_scales(zero_ptr, z, here, block + i, row, PARTS, INPUTS, OUTPUTS, WARPS)
        async_copy.mbarrier_arrive(full.index(here), increment_count=False)
        pointers += BLOCK


@gluon.jit
def _code_scales(scale_ptr, s, here, block, row, PARTS: gl.constexpr, INPUTS: gl.constexpr, OUTPUTS: gl.constexpr,
                 WARPS: gl.constexpr):  # fmt: skip
    """Copy the scales of a block of codes, which each tile of each part's rows has together (see packed.py). Nothing is
    read of tiles behind the part's last row."""
    SIZE: gl.constexpr = s.shape[2]  # of a block and tile
    LINE: gl.constexpr = INPUTS * SIZE // 128  # of a tile
    WIDE: gl.constexpr = 128 // s.dtype.primitive_bitwidth  # of 16 bytes
    LANES: gl.constexpr = SIZE // WIDE
    layout: gl.constexpr = gl.BlockedLayout([1, WIDE], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    tile = gl.expand_dims(gl.arange(0, s.shape[1], gl.SliceLayout(1, layout)), 1)
    at = block * SIZE + gl.expand_dims(gl.arange(0, SIZE, gl.SliceLayout(0, layout)), 0)
    for part in gl.static_range(PARTS):
        pointers = scale_ptr + part * (OUTPUTS // 64 * LINE) + tile * LINE + at
        mask = (at < LINE) & (tile >= 0)
        if OUTPUTS % (64 * s.shape[1]) != 0:
            mask = mask & (tile < OUTPUTS // 64 - row // 64)
        load_rows(s.index(here * PARTS + part), pointers, mask=mask)


@gluon.jit
def gatherer(
    x_ptr, token_ptr, beside_ptr, zero_ptr, x_rows, counts, x, s, z, full, empty, at, end, expert, place, first, count,
    INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, TILES: gl.constexpr,
    TOKENS: gl.constexpr, NARROW: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, GATHER: gl.constexpr,
    BESIDE: gl.constexpr, ZEROS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Fill the ring with the pairs' rows, for all items of this program."""
    BLOCKS: gl.constexpr = (INPUTS + BLOCK - 1) // BLOCK
    if PDL:
        gdc_wait()
    step = at * 0
    while at < end:
        units = (count + (TOKENS - 1)) // TOKENS
        pair = place % units * TOKENS
        block = at % BLOCKS
        steps = gl.minimum(BLOCKS - block, end - at)
        scale_ptr, own_zero_ptr = beside_ptr, zero_ptr
        row = place // units * ROWS
        if BESIDE == "codes":
            line = (expert * (PARTS * OUTPUTS) + row) // 64 * (INPUTS * s.shape[2] // 128)
            scale_ptr += line
            if ZEROS:
                own_zero_ptr += line
        if count - pair <= NARROW:
            gather_rows(
                x_ptr, token_ptr, x, s, z, full, empty, scale_ptr, own_zero_ptr, x_rows, step, steps, first + pair,
                count - pair, block, row, NARROW, INPUTS, OUTPUTS, PARTS, BLOCK, STAGES, GATHER, BESIDE, ZEROS,
                gl.num_warps(),
            )  # fmt: skip
        else:
            gather_rows(
                x_ptr, token_ptr, x, s, z, full, empty, scale_ptr, own_zero_ptr, x_rows, step, steps, first + pair,
                count - pair, block, row, TOKENS, INPUTS, OUTPUTS, PARTS, BLOCK, STAGES, GATHER, BESIDE, ZEROS,
                gl.num_warps(),
            )  # fmt: skip
        step += steps
        at += steps
        expert, place, first, count = next_piece(counts, at, end, expert, place, first, count, TOKENS, TILES)


@gluon.jit
def streamer(
    w_desc, counts, w, full, empty, at, end, expert, place, first, count,
    INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, TILES: gl.constexpr,
    TOKENS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, BYTES: gl.constexpr, CODED: gl.constexpr,
):  # fmt: skip
    """Fill the ring with weights, for all items of this program. BYTES: of a row in a block."""
    BLOCKS: gl.constexpr = (INPUTS + BLOCK - 1) // BLOCK
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
                if CODED:
                    _load_codes(w_desc, w.index(here * PARTS + part), full.index(here), row + part * OUTPUTS,
                                block + i, INPUTS)  # fmt: skip
                else:
                    _load_panels(w_desc, w, full.index(here), here * PARTS + part, row + part * OUTPUTS, block + i,
                                 BYTES)  # fmt: skip
        step += steps
        at += steps
        expert, place, first, count = next_piece(counts, at, end, expert, place, first, count, TOKENS, TILES)


@gluon.jit
def _load_panels(w_desc, w, full, at, row, block, BYTES: gl.constexpr):
    """Copy a block of a part's rows, panel by panel."""
    WIDE: gl.constexpr = w.shape[2]  # numbers of a row in a panel
    PANELS: gl.constexpr = BYTES // 128
    for panel in gl.static_range(PANELS):
        load_tile(w_desc, [row, (block * PANELS + panel) * WIDE], full, w.index(at * PANELS + panel))


@gluon.jit
def _load_codes(w_desc, w, full, row, block, INPUTS: gl.constexpr):
    """Copy a block of codes of each tile of a part's rows (see packed.py). Behind an odd number of panels comes the
    first one of the next tile, which meets zeros of x. w: [tiles · 32, 64]."""
    COUNT: gl.constexpr = w.shape[0] // 32
    layout: gl.constexpr = w.layout
    tiles = viewed(w, [COUNT, 32, 64], layout)
    for tile in gl.static_range(COUNT):
        first = (row // 64 + tile) * (INPUTS // 4) + block * 32
        load_tile(w_desc, [first, 0], full, tiles.index(tile))
