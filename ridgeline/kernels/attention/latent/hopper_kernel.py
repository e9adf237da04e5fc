"""Latent attention for Hopper: bulk tensor copies, warpgroup MMA, and a warp that only copies.

A program holds 64 of an item's or a tile's queries, which are (token, head) pairs, and their sums: 64 x 512 in
float32, half in the registers of each of two warpgroups. A tile of 128 vectors is copied once and multiplied twice, as
keys and as values. Each warpgroup computes the scores of half of a tile's keys: 64, since a product of 32 would read
its operands more slowly than it multiplies. The weights then go through shared memory, since both warpgroups multiply
all of them, each with its half of the values' columns. They lie where the rotated parts were, which nobody needs once
scores are there: the tile and the queries fill the shared memory. Values are multiplied a half of the tile after the
other, and the next tile's first half arrives during the second product.

What a program attends with and where its result goes is as in triton_kernel.py, whose combine_kernel adds up parts.

Legend:
    M  queries of a program
    J  keys of a tile
    L  width of a latent, RANK
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

from ridgeline.kernels.attention.paged.hopper_copies import PANEL, _blocks
from ridgeline.kernels.attention.paged.hopper_kernel import zero_rows
from ridgeline.kernels.attention.paged.triton_common import LOWEST
from ridgeline.kernels.hopper.gluon_names import barrier, barriers, load_tile, viewed

QUERIES = gl.constexpr(64)
RANK = gl.constexpr(512)
ROPE = gl.constexpr(64)
WARPS = gl.constexpr(8)


@gluon.jit
def _load_queries(q_ptr, stride_token, stride_head, pairs, into, HEADS: gl.constexpr, WIDTH: gl.constexpr):
    """Copy the queries of a program to shared memory, and zeros behind the last one.

    pairs: (first token, first pair, number of pairs) of the program's item.
    """
    first_token, first_pair, count = pairs
    ACROSS: gl.constexpr = 32 if WIDTH >= 256 else WIDTH // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    pair = gl.expand_dims(first_pair + gl.arange(0, QUERIES, gl.SliceLayout(1, layout)), 1)
    column = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, layout)), 0)
    row = (first_token + pair // HEADS).to(gl.int64) * stride_token + (pair % HEADS).to(gl.int64) * stride_head
    real = (pair < count) & (column < WIDTH)
    into.store(gl.load(q_ptr + (row + column), mask=real, other=0))


@gluon.jit
def _copy(
    desc, row_ptr, stretch, block_rows, nowhere, rings, P: gl.constexpr, BOX: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Copy the tiles of a stretch, half by half, as boxes of BOX tokens that lie within one block, 64 columns at a
    time."""
    begin, end, tiles = stretch
    latents, rotated, full, empty = rings
    layout: gl.constexpr = desc.layout
    HALF: gl.constexpr = KEYS // 2
    boxes = viewed(latents, [RANK // PANEL * (KEYS // BOX), BOX, PANEL], layout)
    rotated_boxes = viewed(rotated, [KEYS // BOX, BOX, PANEL], layout)
    blocks = _blocks(row_ptr, begin, begin, end, P, BOX, KEYS)
    for i in range(tiles):
        first = begin + i * KEYS
        next_blocks = _blocks(row_ptr, first + KEYS, begin, end, P, BOX, KEYS)  # a tile ahead
        for half in gl.static_range(2):
            bar = full.index(half)
            mbarrier.wait(empty.index(half), (i & 1) ^ 1)
            mbarrier.expect(bar, HALF * (RANK + ROPE) * 2)
            for b in gl.static_range(half * (HALF // BOX), (half + 1) * (HALF // BOX)):
                # A box behind the last key is addressed outside the cache, where copies read zeros.
                row = gl.where(blocks[b] >= 0, blocks[b] * block_rows + (first + b * BOX) % P, nowhere)
                for panel in gl.static_range(RANK // PANEL):
                    load_tile(desc, [row, panel * PANEL], bar, boxes.index(panel * (KEYS // BOX) + b))
                load_tile(desc, [row, RANK], bar, rotated_boxes.index(b))
        blocks = next_blocks


@gluon.jit
def _own_sums(x, KEYS: gl.constexpr):
    """Return the sums of each thread's own numbers in its rows, [QUERIES, 2, 4]: no thread asks another."""
    return gl.sum(gl.sum(x.reshape([QUERIES, 2, KEYS // 16, 4, 2]), 4), 2)


@gluon.jit
def _attend(
    queries, pairs, position, entry, num_parts, stretch, rings, shared, results, scale,
    HEADS: gl.constexpr, TOKENS: gl.constexpr, BOX: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Attend with the program's queries, and store the result, or a part of it.

    queries: (latents' queries, rotated ones, and the strides of both).
    """
    q_ptr, rotated_ptr, stride_q_token, stride_q_head, stride_rotated_token, stride_rotated_head = queries
    begin, end, tiles = stretch
    latents, rotated, full, empty = rings
    q, q_rotated = shared
    HALF: gl.constexpr = KEYS // 2
    tile_layout: gl.constexpr = latents.layout
    weights = viewed(rotated, [QUERIES, KEYS], tile_layout)
    first_token, first_pair, count = pairs
    dtype: gl.constexpr = q.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, KEYS // 2, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, RANK // 2, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    _load_queries(q_ptr, stride_q_token, stride_q_head, pairs, q, HEADS, RANK)
    _load_queries(rotated_ptr, stride_rotated_token, stride_rotated_head, pairs, q_rotated, HEADS, ROPE)
    fence_async_shared()
    barrier()
    o = gl.zeros([QUERIES, RANK], gl.float32, o_layout)
    m = gl.full([QUERIES], LOWEST, gl.float32, s_rows)
    total = _own_sums(gl.zeros([QUERIES, KEYS], gl.float32, s_layout), KEYS)
    total_rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, total.type.layout))
    last = position + (first_pair + gl.arange(0, QUERIES, s_rows)) // HEADS  # key that a query sees
    all_see = gl.minimum(position + first_pair // HEADS + 1, end)  # keys before it are there for every query
    last = gl.expand_dims(gl.minimum(last, end - 1), 1)
    key = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(0, s_layout)), 0)
    for i in range(tiles):
        mbarrier.wait(full.index(0), i & 1)
        mbarrier.wait(full.index(1), i & 1)
        left = end - begin - i * KEYS
        if (left < KEYS) & (left % BOX != 0):
            zero_rows(latents, left, (left + BOX - 1) // BOX * BOX, RANK, KEYS, WARPS)
            barrier()
        nothing = gl.zeros([QUERIES, KEYS], gl.float32, s_layout)
        s = warpgroup_mma(q_rotated, rotated.permute((1, 0)), nothing, use_acc=False, is_async=True)
        s = warpgroup_mma(q, latents.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        if begin + i * KEYS + KEYS > all_see:  # NaN of cells that no query sees ends here
            s = gl.where(key + (begin + i * KEYS) <= last, s, float("-inf"))
        new = gl.maximum(m, gl.max(s, 1) * scale)
        p = gl.exp2(s * scale - gl.expand_dims(new, 1))
        shrink = gl.exp2(m - new)
        shrink_total = gl.expand_dims(gl.expand_dims(gl.convert_layout(shrink, total_rows), 1), 2)
        total = total * shrink_total + _own_sums(p, KEYS)
        m = new
        barrier()  # both warpgroups have their scores: the rotated parts may go
        weights.store(p.to(dtype))
        fence_async_shared()
        barrier()
        o = o * gl.expand_dims(gl.convert_layout(shrink, o_rows), 1)
        o = warpgroup_mma(weights.slice(0, HALF, 1), latents.slice(0, HALF, 0), o, is_async=True)
        o = warpgroup_mma(weights.slice(HALF, HALF, 1), latents.slice(HALF, HALF, 0), o, is_async=True)
        o = warpgroup_mma_wait(1, deps=(o,))
        mbarrier.arrive(empty.index(0), count=1)
        o = warpgroup_mma_wait(0, deps=(o,))
        mbarrier.arrive(empty.index(1), count=1)
    out_ptr, parts_ptr, part_lse_ptr = results
    total = gl.convert_layout(gl.sum(gl.sum(total, 2), 1), s_rows)
    share = gl.where(total > 0, 1 / total, gl.zeros_like(total))  # a stopped row may have queries that see nothing
    o = o * gl.expand_dims(gl.convert_layout(share, o_rows), 1)
    pair = gl.expand_dims(first_pair + gl.arange(0, QUERIES, o_rows), 1)
    column = gl.expand_dims(gl.arange(0, RANK, gl.SliceLayout(0, o_layout)), 0)
    stored = (pair < count).broadcast_to([QUERIES, RANK])
    if num_parts == 1:
        at = (first_token.to(gl.int64) * HEADS + pair) * RANK + column
        gl.store(out_ptr + at, o.to(dtype), mask=stored)
    else:
        of_entry = entry.to(gl.int64) * (TOKENS * HEADS)
        gl.store(parts_ptr + ((of_entry + pair) * RANK + column), o, mask=stored)
        own = first_pair + gl.arange(0, QUERIES, s_rows)
        gl.store(part_lse_ptr + (of_entry + own), m + gl.log2(total), mask=own < count)


@gluon.jit
def latent_hopper_kernel(
    desc, q_ptr, rotated_ptr, out_ptr, table_ptr, work_ptr, counts_ptr, parts_ptr, part_lse_ptr, whose_ptr, scale,
    stride_q_token, stride_q_head, stride_rotated_token, stride_rotated_head, block_rows, stride_table, nowhere,
    HEADS: gl.constexpr, TOKENS: gl.constexpr, P: gl.constexpr, BOX: gl.constexpr, KEYS: gl.constexpr,
    ITEMS: gl.constexpr, PRODUCER_REGS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Attend with 64 queries of an item, or of a tile. desc is of the cache's memory as lines of L + 64 numbers; the
    other arguments are those of `triton_kernel.latent_kernel`.

    block_rows: lines from one block to the next. nowhere: a line behind the last one.
    """
    CUTS: gl.constexpr = (TOKENS * HEADS + QUERIES - 1) // QUERIES
    entry = gl.program_id(0) // CUTS
    first_pair = gl.program_id(0) % CUTS * QUERIES
    dtype: gl.constexpr = desc.dtype
    layout: gl.constexpr = desc.layout
    q = gl.allocate_shared_memory(dtype, [QUERIES, RANK], layout)
    q_rotated = gl.allocate_shared_memory(dtype, [QUERIES, ROPE], layout)
    latents = gl.allocate_shared_memory(dtype, [KEYS, RANK], layout)
    rotated = gl.allocate_shared_memory(dtype, [KEYS, ROPE], layout)
    full, empty = barriers(2), barriers(2)
    fence_async_shared()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if ITEMS:
        here_ptr = work_ptr + entry * 8
        real = entry < gl.load(counts_ptr)
        slot = gl.load(here_ptr, mask=real, other=0)
        first_token = gl.load(here_ptr + 1, mask=real, other=0)
        tokens = gl.load(here_ptr + 2, mask=real, other=0)
        position = gl.load(here_ptr + 3, mask=real, other=0) - tokens
        begin = gl.load(here_ptr + 4, mask=real, other=0)
        end = gl.load(here_ptr + 5, mask=real, other=0)
        first_item = gl.load(here_ptr + 6, mask=real, other=0)
        num_parts = gl.load(here_ptr + 7, mask=real, other=1)
        leads = real & (entry == first_item) & (first_pair == 0)
        gl.store(whose_ptr + first_token * 2, first_item, mask=leads)
        gl.store(whose_ptr + first_token * 2 + 1, num_parts, mask=leads)
    else:
        here_ptr = work_ptr + entry * 4
        real = entry < gl.load(counts_ptr + 1)
        slot = gl.load(here_ptr, mask=real, other=0)
        first_token = gl.load(here_ptr + 1, mask=real, other=0)
        tokens = gl.load(here_ptr + 2, mask=real, other=0)
        position = gl.load(here_ptr + 3, mask=real, other=0)
        begin = gl.minimum(position, 0)  # Triton 3.6 takes no constant among what the copying warp is given
        end = position + tokens
        num_parts = begin + 1
    count = tokens * HEADS
    tiles = gl.where(first_pair < count, (end - begin + KEYS - 1) // KEYS, 0)
    stretch = (begin, end, tiles)
    rings = (latents, rotated, full, empty)
    queries = (q_ptr, rotated_ptr, stride_q_token, stride_q_head, stride_rotated_token, stride_rotated_head)
    pairs, results = (first_token, first_pair, count), (out_ptr, parts_ptr, part_lse_ptr)
    row_ptr = table_ptr + slot.to(gl.int64) * stride_table
    shared = (q, q_rotated)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    queries, pairs, position, entry, num_parts, stretch, rings, shared, results, scale,
                    HEADS, TOKENS, BOX, KEYS,
                ),
            ),
            (_copy, (desc, row_ptr, stretch, block_rows, nowhere, rings, P, BOX, KEYS)),
        ],
        [1],
        [PRODUCER_REGS],
    )  # fmt: skip
