"""Products of a ring's blocks on Hopper's matrix units, for weights that they read from shared memory: 16-bit types,
and E4M3 beside rounded activations.

Hopper's matrix units keep about 14 bits of a sum of E4M3 products. Where weights have a scale for each block of 128
inputs, or a power of two for each 32 inputs of a row, the sums of these leave the matrix units, are scaled, and are
added up in float32.

Legend:
    C  weight rows of one part, which are the outputs of a tile
    W  pairs of a tile
"""

# mypy: disable-error-code="assignment, var-annotated"
# ruff: noqa: RUF005 - Gluon knows no starred tuples
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from ridgeline.kernels.hopper.gluon_names import viewed
from ridgeline.kernels.hopper.ring import awaited, sums_layout, zeros


@gluon.jit
def first_rows(tile, WIDTH: gl.constexpr):
    """Return the first WIDTH rows of a panel of pairs."""
    layout: gl.constexpr = tile.layout
    COUNT: gl.constexpr = tile.shape[0] // WIDTH
    PANEL: gl.constexpr = tile.shape[1]
    return viewed(tile, [COUNT, WIDTH, PANEL], layout).index(0)


@gluon.jit
def products(
    w, x, full, empty, step, steps,
    ROWS: gl.constexpr, PARTS: gl.constexpr, WIDTH: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Return the parts' sums, [C, W] each. A stage is given back when the products after it are under way."""
    layout: gl.constexpr = sums_layout(ROWS, WIDTH, x.dtype.primitive_bitwidth)
    sums = zeros(ROWS, WIDTH, PARTS, layout, gl.float32)
    for i in range(steps):
        here = (step + i) % STAGES
        mbarrier.wait(full.index(here), ((step + i) // STAGES) & 1)
        fence_async_shared()  # rows that threads copied are read by the matrix units next
        grown = ()
        for part in gl.static_range(PARTS):
            sum_CW = sums[part]
            for panel in gl.static_range(PANELS):
                a = w.index((here * PARTS + part) * PANELS + panel)
                b = first_rows(x.index(here * PANELS + panel), WIDTH).permute((1, 0))
                sum_CW = warpgroup_mma(a, b, sum_CW, is_async=True)
            grown = grown + (sum_CW,)
        sums = awaited(grown, PARTS * PANELS, PARTS)
        mbarrier.arrive(empty.index((step + i + STAGES - 1) % STAGES), count=1, pred=i > 0)
    sums = awaited(sums, 0, PARTS)
    mbarrier.arrive(empty.index((step + steps + STAGES - 1) % STAGES), count=1)
    return sums


@gluon.jit
def _scales(scale_ptr, column, COLUMNS: gl.constexpr, PARTS: gl.constexpr, BEHIND: gl.constexpr):
    """Return the scales of each part's rows in a block of inputs: one for all rows, or with a pointer for each row one
    for each."""
    scales = ()
    for part in gl.static_range(PARTS):
        scales = scales + (gl.load(scale_ptr + part * BEHIND + gl.minimum(column, COLUMNS - 1)),)
    return scales


@gluon.jit
def promoted(
    w, x, s, full, empty, scale_ptr, step, steps, block,
    ROWS: gl.constexpr, PARTS: gl.constexpr, WIDTH: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
    COLUMNS: gl.constexpr, BEHIND: gl.constexpr,
):  # fmt: skip
    """Return the parts' sums, as `products` does, for E4M3 with scales of blocks: a panel is a block of 128 inputs.

    s: the scales of the pairs' rows, [W] for each panel of the ring.
    scale_ptr: the scales of the first part's rows, COLUMNS of them. BEHIND: the second part's behind the first's.
    block: of the first stage. Weights' scales are asked for one panel ahead.
    """
    layout: gl.constexpr = sums_layout(ROWS, WIDTH, x.dtype.primitive_bitwidth)
    sums = zeros(ROWS, WIDTH, PARTS, layout, gl.float32)
    nothing_CW = gl.zeros([ROWS, WIDTH], gl.float32, layout)
    scales = _scales(scale_ptr, block * PANELS, COLUMNS, PARTS, BEHIND)
    for i in range(steps):
        here = (step + i) % STAGES
        mbarrier.wait(full.index(here), ((step + i) // STAGES) & 1)
        fence_async_shared()
        for panel in gl.static_range(PANELS):
            b = first_rows(x.index(here * PANELS + panel), WIDTH).permute((1, 0))
            fresh = ()
            for part in gl.static_range(PARTS):
                a = w.index((here * PARTS + part) * PANELS + panel)
                fresh = fresh + (warpgroup_mma(a, b, nothing_CW, use_acc=False, is_async=True),)
            coming = _scales(scale_ptr, (block + i) * PANELS + panel + 1, COLUMNS, PARTS, BEHIND)
            x_scale_W = s.index(here * PANELS + panel).slice(0, WIDTH).load(gl.SliceLayout(0, layout))
            fresh = awaited(fresh, 0, PARTS)
            grown = ()
            for part in gl.static_range(PARTS):
                grown = grown + (sums[part] + fresh[part] * gl.expand_dims(x_scale_W * scales[part], 0),)
            sums = grown
            scales = coming
        mbarrier.arrive(empty.index(here), count=1)
    return sums


@gluon.jit
def promoted_by_rows(
    w, x, s, full, empty, scale_ptr, step, steps, block, row,
    ROWS: gl.constexpr, PARTS: gl.constexpr, WIDTH: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
    WORDS: gl.constexpr, OUTPUTS: gl.constexpr,
):  # fmt: skip
    """Return the parts' sums, as `promoted` does, for MXFP8: each row has an exponent of two for each 32 inputs, with
    the bias 127. A panel is 128 inputs, so four products.

    scale_ptr: the expert's words of four exponents, WORDS for each row. row: the tile's first.
    """
    TOGETHER: gl.constexpr = 4 if WIDTH <= 16 else 1  # products under way, which the registers hold
    layout: gl.constexpr = sums_layout(ROWS, WIDTH, x.dtype.primitive_bitwidth)
    sums = zeros(ROWS, WIDTH, PARTS, layout, gl.float32)
    nothing_CW = gl.zeros([ROWS, WIDTH], gl.float32, layout)
    row_C = gl.minimum(row + gl.arange(0, ROWS, gl.SliceLayout(1, layout)), OUTPUTS - 1)
    words = _scales(scale_ptr + row_C * WORDS, block * PANELS, WORDS, PARTS, OUTPUTS * WORDS)
    for i in range(steps):
        here = (step + i) % STAGES
        mbarrier.wait(full.index(here), ((step + i) // STAGES) & 1)
        fence_async_shared()
        for panel in gl.static_range(PANELS):
            right = first_rows(x.index(here * PANELS + panel), WIDTH)
            coming = _scales(scale_ptr + row_C * WORDS, (block + i) * PANELS + panel + 1, WORDS, PARTS, OUTPUTS * WORDS)
            x_scale_W = s.index(here * PANELS + panel).slice(0, WIDTH).load(gl.SliceLayout(0, layout))
            grown = ()
            for part in gl.static_range(PARTS):
                left = w.index((here * PARTS + part) * PANELS + panel)
                sum_CW = sums[part]
                for first in gl.static_range(0, 4, TOGETHER):
                    fresh = ()
                    for j in gl.static_range(first, first + TOGETHER):
                        b = right.slice(j * 32, 32, 1).permute((1, 0))
                        a = left.slice(j * 32, 32, 1)
                        fresh = fresh + (warpgroup_mma(a, b, nothing_CW, use_acc=False, is_async=True),)
                    fresh = awaited(fresh, 0, TOGETHER)
                    for j in gl.static_range(first, first + TOGETHER):
                        scale_C = (((words[part] >> (8 * j)) & 255) << 23).to(gl.float32, bitcast=True)
                        scale_CW = gl.expand_dims(scale_C, 1) * gl.expand_dims(x_scale_W, 0)
                        sum_CW = sum_CW + fresh[j - first] * scale_CW
                grown = grown + (sum_CW,)
            sums = grown
            words = coming
        mbarrier.arrive(empty.index(here), count=1)
    return sums


@gluon.jit
def times(sums, factor_ptr, expert, PARTS: gl.constexpr):
    """Return the sums times the expert's factor."""
    factor = gl.load(factor_ptr + expert)
    grown = ()
    for part in gl.static_range(PARTS):
        grown = grown + (sums[part] * factor,)
    return grown


@gluon.jit
def rescaled(
    sums, scale_ptr, x_scale_ptr, token_ptr, expert, row, pair, last,
    OUTPUTS: gl.constexpr, PARTS: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """Return the sums of E4M3 products times the scales of their outputs and of their pairs' rows."""
    layout: gl.constexpr = sums[0].type.layout
    line_W = pair + gl.arange(0, sums[0].shape[1], gl.SliceLayout(0, layout))
    real_W = line_W < last
    if GATHER:
        line_W = gl.load(token_ptr + line_W, mask=real_W, other=0)
    x_scale_W = gl.load(x_scale_ptr + line_W, mask=real_W, other=0)
    row_C = row + gl.arange(0, sums[0].shape[0], gl.SliceLayout(1, layout))
    grown = ()
    for part in gl.static_range(PARTS):
        scale_C = gl.load(scale_ptr + (expert * PARTS + part) * OUTPUTS + row_C, mask=row_C < OUTPUTS, other=0)
        grown = grown + (sums[part] * gl.expand_dims(scale_C, 1) * gl.expand_dims(x_scale_W, 0),)
    return grown
