"""Products of 8-bit numbers on Hopper where the matrix units are the bound: tiles of 128 tokens by 256 weight rows, or
of 128 or 256 tokens by 128.

Each of two warpgroups multiplies half of the tokens, and one warp fills a ring of shared memory. A program takes its
share of the tiles one after the other, so the ring fills with the next tile's blocks while the last one's results are
written.

With PROMOTE the sums of each 128 inputs leave the matrix units and are added up in float32 (see hopper/stream.py).
Tiles then have 128 rows: partial sums of 64 x 256 and sums of as many would take 256 registers of a thread. While one
warpgroup adds, the other one multiplies. Scales are loaded 128 inputs ahead.

Of 256 tokens a warpgroup multiplies two waves of 64 one after the other, which share the partial sums' registers (64 +
128). A byte that is loaded then serves as many products as in tiles of 128 x 256: 48 KiB take 1024 clocks of the matrix
units. Tiles of 128 x 128 take 32 KiB for 512 clocks, more than the second-level cache delivers (1,519 TFLOP/s with
tiles of 128 x 256 need 37 bytes a clock and multiprocessor). Adding up is 64 instructions of each of two warps of a
scheduler for 256 clocks of the matrix units, with the scales some 90, which leaves them two thirds idle.

Legend:
    W  tokens of a warpgroup
    C  weight rows of half a tile: outputs, of a gated pair the gates or the matching ups
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

from ridgeline.kernels.hopper.finish import halves, neighbours
from ridgeline.kernels.hopper.gluon_names import barriers, load_tile, viewed
from ridgeline.kernels.hopper.stream import GROUP as PANEL
from ridgeline.kernels.small.activation.triton import gated

TOGETHER = gl.constexpr(2048)  # neighbouring tokens whose tiles go through the weights together


@gluon.jit
def _place(item, tokens, outputs, TOKENS: gl.constexpr, HALF: gl.constexpr, PARTS: gl.constexpr):
    """Return (first token, first output) of a tile."""
    MOST: gl.constexpr = TOGETHER // TOKENS
    columns = gl.cdiv(outputs, 2 * HALF // PARTS)
    first = item // (MOST * columns) * MOST
    beside = gl.minimum(gl.cdiv(tokens, TOKENS) - first, MOST)
    place = item % (MOST * columns)
    return (first + place % beside) * TOKENS, place // beside * (2 * HALF // PARTS)


@gluon.jit
def _loader(
    x_desc, w_desc, x, w, full, empty, items, tokens, outputs, blocks,
    HALF: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Fill the ring with blocks of x and of weights, for all tiles of this program."""
    TOKENS: gl.constexpr = x.shape[1]
    w_layout: gl.constexpr = w_desc.layout
    x_layout: gl.constexpr = x_desc.layout
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token, row = _place(item, tokens, outputs, TOKENS, HALF, PARTS)
        for block in range(blocks):
            here = step % STAGES
            mbarrier.wait(empty.index(here), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(here), (2 * HALF + TOKENS) * PANEL)
            halves = viewed(w.index(here), [2, HALF, PANEL], w_layout)
            for half in gl.static_range(2):
                corner = [row + half * (outputs if PARTS == 2 else HALF), block * PANEL]
                load_tile(w_desc, corner, full.index(here), halves.index(half))
            if PDL and step == 0:
                gdc_wait()  # the kernel before writes x
            boxes = viewed(x.index(here), [1, TOKENS, PANEL], x_layout)
            load_tile(x_desc, [token, block * PANEL], full.index(here), boxes.index(0))
            step += 1


@gluon.jit
def _products(x, w, full, empty, step, blocks, PART: gl.constexpr, STAGES: gl.constexpr, SUM: gl.constexpr):
    """Return the sums of both halves, [W, C] each. A stage is given back when the products after it are under way."""
    HALF: gl.constexpr = w.shape[1] // 2
    # Triton 3.6 compiles no product of int8 with 256 columns
    WIDE: gl.constexpr = 2 * HALF if gl.float32 == SUM else HALF
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 32])
    x_layout: gl.constexpr = x.type.layout
    sums = gl.zeros([64, 2 * HALF], SUM, layout)
    for block in range(blocks):
        here = (step + block) % STAGES
        mbarrier.wait(full.index(here), ((step + block) // STAGES) & 1)
        a = viewed(x.index(here), [2, 64, PANEL], x_layout).index(PART)
        sums = warpgroup_mma(a, w.index(here).permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_wait(1, deps=(sums,))
        mbarrier.arrive(empty.index((step + block + STAGES - 1) % STAGES), count=1, pred=block > 0)
    sums = warpgroup_mma_wait(0, deps=(sums,))
    mbarrier.arrive(empty.index((step + blocks + STAGES - 1) % STAGES), count=1)
    low_WC, high_WC = halves(sums.to(gl.float32))
    return low_WC, high_WC


@gluon.jit
def _promoted(
    x, w, full, empty, x_scale_ptr, w_scale_ptr, step, blocks, token, row, tokens, outputs, inputs,
    PART: gl.constexpr, PARTS: gl.constexpr, WAVES: gl.constexpr, STAGES: gl.constexpr, BLOCKED: gl.constexpr,
):  # fmt: skip
    """Return the sums of both halves for each wave of 64 tokens: (low, high, low, high …). The sums of each 128 inputs
    are added up in float32, and scaled if BLOCKED.

    A wave's products are all done when the next wave's begin, so one wave's partial sums are in registers.
    """
    HALF: gl.constexpr = w.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * HALF, 32])
    x_layout: gl.constexpr = x.type.layout
    zeros = gl.zeros([64, 2 * HALF], gl.float32, layout)
    low_WC, high_WC = halves(zeros)
    sums = (low_WC, high_WC) if WAVES == 1 else (low_WC, high_WC, low_WC, high_WC)
    # A thread has the same rows of halves as of a tile
    rows: gl.constexpr = gl.SliceLayout(1, low_WC.type.layout)
    row_W = gl.arange(0, 64, rows)
    x_scale_ptr += token
    columns = gl.cdiv(inputs, PANEL)
    low_ptr = w_scale_ptr + row // PANEL * columns
    last = gl.cdiv(PARTS * outputs, PANEL) - 1
    high_ptr = w_scale_ptr + gl.minimum((row + (outputs if PARTS == 2 else HALF)) // PANEL, last) * columns
    x_scales = _wave_scales(x_scale_ptr, row_W, WAVES) if BLOCKED else ()
    for block in range(blocks):
        here = (step + block) % STAGES
        if BLOCKED:
            low_scale, high_scale = gl.load(low_ptr + block), gl.load(high_ptr + block)
        # A block ahead; those of the last one again, so that nothing is read beyond
        x_scale_ptr += gl.where(block + 1 < blocks, tokens, 0)
        mbarrier.wait(full.index(here), ((step + block) // STAGES) & 1)
        waves = viewed(x.index(here), [2 * WAVES, 64, PANEL], x_layout)
        grown = ()
        coming = ()
        for wave in gl.static_range(WAVES):
            a = waves.index(PART * WAVES + wave)
            more = warpgroup_mma(a, w.index(here).permute((1, 0)), zeros, use_acc=False, is_async=True)
            more = warpgroup_mma_wait(0, deps=(more,))
            if wave == WAVES - 1:
                mbarrier.arrive(empty.index(here), count=1)
            low_WC, high_WC = halves(more)
            if BLOCKED:
                low_WC = low_WC * gl.expand_dims(x_scales[wave] * low_scale, 1)
                high_WC = high_WC * gl.expand_dims(x_scales[wave] * high_scale, 1)
                coming = coming + (gl.load(x_scale_ptr + wave * 64 + row_W),)  # type: ignore[assignment]  # noqa: RUF005
            grown = grown + (sums[2 * wave] + low_WC, sums[2 * wave + 1] + high_WC)  # type: ignore[assignment]  # noqa: RUF005
        sums = grown  # type: ignore[assignment]
        x_scales = coming
    return sums


@gluon.jit
def _wave_scales(x_scale_ptr, row_W, WAVES: gl.constexpr):
    """Return the scales of each wave's tokens in the first block of inputs [W]. Behind the last token any numbers are
    read: the memory of scales goes on there, and a mask would take registers."""
    scales = ()
    for wave in gl.static_range(WAVES):
        scales = scales + (gl.load(x_scale_ptr + wave * 64 + row_W),)  # type: ignore[assignment]  # noqa: RUF005
    return scales


@gluon.jit
def _finished(
    sum_WC, x_scale_ptr, w_scale_ptr, bias_ptr, token, row, tokens, end,
    BLOCKED: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Return the sums of one half with scales and bias, whose pointers are those of its first row. end: the last row
    and one."""
    layout: gl.constexpr = sum_WC.type.layout
    at_C = row + gl.arange(0, sum_WC.shape[1], gl.SliceLayout(0, layout))
    if not BLOCKED:
        token_W = token + gl.arange(0, 64, gl.SliceLayout(1, layout))
        x_W = gl.load(x_scale_ptr + token_W, mask=token_W < tokens, other=0)
        w_C = gl.load(w_scale_ptr + at_C, mask=at_C < end, other=0)
        sum_WC = sum_WC * gl.expand_dims(x_W, 1) * gl.expand_dims(w_C, 0)
    if BIAS:
        bias_C = gl.load(bias_ptr + at_C, mask=at_C < end, other=0)
        sum_WC += gl.expand_dims(bias_C.to(gl.float32), 0)
    return sum_WC


@gluon.jit
def _write(y_WC, y_ptr, token, row, tokens, outputs):
    """Round results, and write those of real tokens and outputs."""
    layout: gl.constexpr = neighbours(y_WC.shape[1])
    y_WC = gl.convert_layout(y_WC.to(y_ptr.dtype.element_ty), layout)
    token_W1 = gl.expand_dims(token + gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
    row_1C = gl.expand_dims(row + gl.arange(0, y_WC.shape[1], gl.SliceLayout(0, layout)), 0)
    pointers = y_ptr + token_W1.to(gl.int64) * outputs + row_1C
    gl.store(pointers, y_WC, mask=(token_W1 < tokens) & (row_1C < outputs))


@gluon.jit
def _consumer(
    x, w, full, empty, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, items, tokens, outputs, inputs, blocks,
    PART: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, BLOCKED: gl.constexpr, PROMOTE: gl.constexpr,
    BIAS: gl.constexpr, GATE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply half of the tokens of every tile of this program, and finish them."""
    TOKENS: gl.constexpr = x.shape[1]
    WAVES: gl.constexpr = TOKENS // 128
    HALF: gl.constexpr = w.shape[1] // 2
    SUM: gl.constexpr = gl.int32 if w.dtype == gl.int8 else gl.float32
    if PDL:
        gdc_wait()  # the kernel before writes the scales of x
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token, row = _place(item, tokens, outputs, TOKENS, HALF, PARTS)
        token += PART * WAVES * 64
        if PROMOTE:
            sums = _promoted(
                x, w, full, empty, x_scale_ptr, w_scale_ptr, step, blocks, token, row, tokens, outputs, inputs,
                PART, PARTS, WAVES, STAGES, BLOCKED,
            )  # fmt: skip
        else:
            sums = _products(x, w, full, empty, step, blocks, PART, STAGES, SUM)
        step += blocks
        shift = outputs if PARTS == 2 else HALF
        for wave in gl.static_range(WAVES):
            low_WC = _finished(
                sums[2 * wave], x_scale_ptr, w_scale_ptr, bias_ptr, token, row, tokens, outputs, BLOCKED, BIAS
            )  # fmt: skip
            high_WC = _finished(
                sums[2 * wave + 1], x_scale_ptr, w_scale_ptr, bias_ptr, token, row + shift, tokens, PARTS * outputs,
                BLOCKED, BIAS,
            )  # fmt: skip
            if GATE == "":
                _write(low_WC, y_ptr, token, row, tokens, outputs)
                _write(high_WC, y_ptr, token, row + HALF, tokens, outputs)
            else:
                _write(gated(low_WC, high_WC, GATE), y_ptr, token, row, tokens, outputs)
            token += 64


@gluon.jit(do_not_specialize=["tokens"])
def tiles_kernel(
    x_desc, w_desc, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, tokens, outputs, inputs,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, BLOCKED: gl.constexpr, PROMOTE: gl.constexpr, BIAS: gl.constexpr,
    GATE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute y [T, O]. The arguments are those of hopper.stream_kernel. With a gate and BLOCKED, the outputs
    must be a multiple of 128.

    TOKENS: those of a tile, 128, or 256 with PROMOTE.
    """
    if PDL:
        gdc_launch_dependents()
    HALF: gl.constexpr = 64 if PROMOTE else 128
    PARTS: gl.constexpr = 1 if GATE == "" else 2
    dtype: gl.constexpr = w_desc.dtype
    layout: gl.constexpr = w_desc.layout
    x = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, PANEL], layout)
    w = gl.allocate_shared_memory(dtype, [STAGES, 2 * HALF, PANEL], layout)
    full, empty = barriers(STAGES), barriers(STAGES, 2)
    fence_async_shared()
    items = gl.cdiv(tokens, TOKENS) * gl.cdiv(outputs, 2 * HALF // PARTS)
    blocks = gl.cdiv(inputs, PANEL)
    gl.warp_specialize(
        [
            (_consumer, (
                x, w, full, empty, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, items, tokens, outputs, inputs, blocks,
                0, PARTS, STAGES, BLOCKED, PROMOTE, BIAS, GATE, PDL,
            )),
            (_consumer, (
                x, w, full, empty, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, items, tokens, outputs, inputs, blocks,
                1, PARTS, STAGES, BLOCKED, PROMOTE, BIAS, GATE, PDL,
            )),
            (_loader, (
                x_desc, w_desc, x, w, full, empty, items, tokens, outputs, blocks, HALF, PARTS, STAGES, PDL,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
