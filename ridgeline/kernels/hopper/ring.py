"""The ring of shared memory of Hopper's products: how it is laid out, filled and multiplied. `stream.py` makes
kernels of it.

A ring is a tuple (w, x, full, empty): the panels of weights [stages · parts · panels, rows, PANEL] and of x [stages ·
panels, tokens, PANEL], and a barrier of each stage for either turn. A panel has 128 bytes of a row: 64 inputs of 16
bits, or 128 of 8.

Legend:
    C  weight rows of one part, which are the outputs of a tile
    T  tokens of a tile
"""

# mypy: disable-error-code="assignment, var-annotated"
# ruff: noqa: RUF005 - Gluon knows no starred tuples
from __future__ import annotations

from functools import cache

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from ridgeline.kernels.hopper.gluon_names import load_tile, viewed

BITS = {"bf16": 16, "i16": 16, "fp8e4nv": 8, "i8": 8}  # of a number, by Triton's name of its type


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Return a descriptor of boxes of so many rows by a panel."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, 128 // x.itemsize], panel_layout(8 * x.itemsize))


@cache
def panel_layout(bits: int) -> gl.NVMMASharedLayout:
    """Return the layout of a panel of numbers of so many bits."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)


def box(kind: str, rows: int) -> str:
    """Return the type of a descriptor, for compiling ahead of time. kind: Triton's name of the numbers' type."""
    bits = BITS[kind]
    return f"tensordesc<{kind}[{rows}, {1024 // bits}],{panel_layout(bits)!r}>"


@gluon.jit
def allocated(
    x_desc, w_desc, ROWS: gl.constexpr, TOKENS: gl.constexpr, BLOCK: gl.constexpr, PARTS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Return the memory (w, x) of a ring with stages of BLOCK inputs."""
    PANEL: gl.constexpr = x_desc.block_shape[1]
    PANELS: gl.constexpr = BLOCK // PANEL
    dtype: gl.constexpr = w_desc.dtype
    layout: gl.constexpr = w_desc.layout
    w = gl.allocate_shared_memory(dtype, [STAGES * PARTS * PANELS, ROWS, PANEL], layout)
    x = gl.allocate_shared_memory(dtype, [STAGES * PANELS, TOKENS, PANEL], layout)
    return w, x


@gluon.jit
def item_of(item, token_tiles, blocks, SPLIT: gl.constexpr):
    """Return (row tile, token tile, first and last input block) of a work index. Items of one row tile run side by
    side."""
    part = item % SPLIT
    tile = item // SPLIT
    return tile // token_tiles, tile % token_tiles, part * blocks // SPLIT, (part + 1) * blocks // SPLIT


@gluon.jit
def load_tokens(x_desc, x, full, stage, token, first, tokens, PANELS: gl.constexpr):
    """Copy a stage's block of x. Boxes beyond the last token would be slow to fill with zeros; the first box is copied
    in their place."""
    layout: gl.constexpr = x_desc.layout
    BOX: gl.constexpr = x_desc.block_shape[0]
    BOXES: gl.constexpr = x.shape[1] // BOX
    PANEL: gl.constexpr = x.shape[2]
    for panel in gl.static_range(PANELS):
        boxes = viewed(x.index(stage * PANELS + panel), [BOXES, BOX, PANEL], layout)
        for at in gl.static_range(BOXES):
            corner = [gl.where(token + at * BOX < tokens, token + at * BOX, 0), first + panel * PANEL]
            load_tile(x_desc, corner, full.index(stage), boxes.index(at))


@gluon.jit
def load_weights(w_desc, ring, step, row, block, outputs, PARTS: gl.constexpr):
    """Return the stage of a step, once it is free, with its block of weights on the way. It expects x too."""
    w, x, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    PANEL: gl.constexpr = x.shape[2]
    PANELS: gl.constexpr = x.shape[0] // STAGES
    BLOCK: gl.constexpr = PANELS * PANEL
    BYTES: gl.constexpr = (PARTS * w.shape[1] + x.shape[1]) * PANELS * 128
    here = step % STAGES
    mbarrier.wait(empty.index(here), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(here), BYTES)
    for part in gl.static_range(PARTS):
        first = row + part * outputs
        for panel in gl.static_range(PANELS):
            place = (here * PARTS + part) * PANELS + panel
            load_tile(w_desc, [first, block * BLOCK + panel * PANEL], full.index(here), w.index(place))
    return here


@gluon.jit
def load_first_tokens(x_desc, ring, steps, token, block, tokens):
    """Copy the blocks of x of a program's first steps, whose weights were asked for before x was there."""
    _, x, full, _ = ring
    PANELS: gl.constexpr = x.shape[0] // full.shape[0]
    BLOCK: gl.constexpr = PANELS * x.shape[2]
    for early in range(steps):
        at = (block + early) * BLOCK
        load_tokens(x_desc, x, full, early, token, at, tokens, PANELS)


@gluon.jit
def producer(
    x_desc, w_desc, ring, items, token_tiles, tokens, outputs, blocks,
    PARTS: gl.constexpr, SPLIT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Fill the ring with blocks of weights and of x, for all items of this program."""
    w, x, full, _ = ring
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = w.shape[1]
    TOKENS: gl.constexpr = x.shape[1]
    PANELS: gl.constexpr = x.shape[0] // STAGES
    BLOCK: gl.constexpr = PANELS * x.shape[2]
    step = 0
    _, _, first, last = item_of(gl.program_id(0), token_tiles, blocks, SPLIT)
    ahead = gl.minimum(last - first, STAGES)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, token_tile, begin, end = item_of(item, token_tiles, blocks, SPLIT)
        for block in range(begin, end):
            here = load_weights(w_desc, ring, step, tile * ROWS, block, outputs, PARTS)
            if step >= ahead:
                load_tokens(x_desc, x, full, here, token_tile * TOKENS, block * BLOCK, tokens, PANELS)
            elif step == ahead - 1:
                if PDL:
                    gdc_wait()
                load_first_tokens(x_desc, ring, ahead, token_tile * TOKENS, begin, tokens)
            step += 1


@gluon.constexpr_function
def sums_layout(rows, width, bits):
    """Return the layout of a tile's sums. bits: of a number that is multiplied."""
    return gl.NVMMADistributedLayout([3, 0], [int(rows) // 16, 1], [16, int(width), 256 // int(bits)])


@gluon.jit
def zeros(ROWS: gl.constexpr, WIDTH: gl.constexpr, PARTS: gl.constexpr, layout: gl.constexpr, SUM: gl.constexpr):
    """Return sums of nothing for each part."""
    sums = ()
    for _ in gl.static_range(PARTS):
        sums = sums + (gl.zeros([ROWS, WIDTH], SUM, layout),)
    return sums


@gluon.jit
def awaited(sums, pending: gl.constexpr, PARTS: gl.constexpr):
    """Return the sums, once at most `pending` products are under way."""
    return (warpgroup_mma_wait(pending, deps=sums),) if PARTS == 1 else warpgroup_mma_wait(pending, deps=sums)


@gluon.jit
def products(ring, step, steps, PARTS: gl.constexpr):
    """Return (the parts' sums [C, T], the next step). A stage is given back when the products after it are
    under way."""
    w, x, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    PANELS: gl.constexpr = x.shape[0] // STAGES
    SUM: gl.constexpr = gl.int32 if w.dtype == gl.int8 else gl.float32
    layout: gl.constexpr = sums_layout(w.shape[1], x.shape[1], w.dtype.primitive_bitwidth)
    sums = zeros(w.shape[1], x.shape[1], PARTS, layout, SUM)
    for i in range(steps):
        here = step % STAGES
        mbarrier.wait(full.index(here), (step // STAGES) & 1)
        grown = ()
        for part in gl.static_range(PARTS):
            sum_CT = sums[part]
            for panel in gl.static_range(PANELS):
                a = w.index((here * PARTS + part) * PANELS + panel)
                b = x.index(here * PANELS + panel).permute((1, 0))
                sum_CT = warpgroup_mma(a, b, sum_CT, is_async=True)
            grown = grown + (sum_CT,)
        sums = awaited(grown, PARTS * PANELS, PARTS)
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=i > 0)
        step += 1
    sums = awaited(sums, 0, PARTS)
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return sums, step
