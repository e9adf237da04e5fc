"""Latent attention over one stretch of a row's keys, for M of the row's queries, which are (token, head) pairs.

All heads read the same vectors, so heads fill the matrix products as tokens do. A tile of vectors is read once and
multiplied twice: as keys, whose last Y numbers are rotated, and, without these, as values. Short rows are cut into
items of their keys and long ones into tiles of their tokens (attention/paged/schedule.py); for this kernel both are a
stretch of keys and some tokens.

If a row has several items, every program stores a part, and a second launch adds the parts up. In
attention/paged/triton_decode.py the last program of a row does that. Here it would be slow, because there is one key
head: a single row of 32k tokens has 264 items, whose parts are 8.6 MB for 16 heads. One multiprocessor would need
longer to read these than all multiprocessors need for the keys.

Legend:
    M  queries of a program, padded
    J  keys of a tile
    L  width of a latent, padded
    Y  width of the rotated part, padded
    I  parts of a row that are read at once
    C  columns of them: numbers of one query's part, then of the next one's
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.attention.paged.triton_common import (
    LOWEST,
    either,
    in_bits,
    load_blocks,
    load_tree,
    place_in_blocks,
    seen_of_tile,
)
from ridgeline.kernels.base.triton_levels import (
    columns_apart,
    columns_joined,
    multiplier,
    scores_of,
    unit,
    with_values,
)

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def latent_kernel(
    q_ptr,
    rotated_ptr,
    cache_ptr,
    r_ptr,
    scale_ptr,
    out_ptr,
    table_ptr,
    work_ptr,
    counts_ptr,
    parts_ptr,
    part_lse_ptr,
    whose_ptr,
    lse_ptr,
    bits_ptr,
    base_ptr,
    scale,
    stride_q_token,
    stride_q_head,
    stride_rotated_token,
    stride_rotated_head,
    stride_block,
    stride_r,
    stride_scale,
    stride_table,
    stride_token: tl.constexpr,  # so that one register addresses all of a thread's share of a tile
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    L: tl.constexpr,
    Y: tl.constexpr,
    TILE: tl.constexpr,
    ITEMS: tl.constexpr,
    TREE: tl.constexpr,
    KV: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend with QUERIES of an item's queries, or of a tile's.

    work: `Schedule.items_I8` if ITEMS, else `Schedule.tiles_J4`; they have up to TOKENS tokens.
    parts [items, TOKENS · HEADS, RANK], part_lse [items, TOKENS · HEADS]: float32, the parts of rows that have several
        items.
    whose: int32 [T, 2], where (first item, items) are left of every row that has items, at its first token.
    lse: float32 [T, HEADS], where the natural logarithms of sums go; None: nowhere.
    scale: log2(e) times the op's.
    RANK, ROPE: L and Y without padding.
    KV: the format of levels, of which a word of the cache has two. Rotated parts and scales lie apart, by strides of
        blocks. None: latents are numbers.
    TREE: queries see the keys of a tree, by bits and base, int64 [T].
    """
    CUTS: tl.constexpr = (TOKENS * HEADS + QUERIES - 1) // QUERIES
    entry, first_pair = tl.program_id(0) // CUTS, tl.program_id(0) % CUTS * QUERIES
    m_M, l_L, y_Y, n_J = tl.arange(0, QUERIES), tl.arange(0, L), tl.arange(0, Y), tl.arange(0, TILE)
    pair_M = first_pair + m_M
    token_M, head_M = pair_M // HEADS, pair_M % HEADS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    num_parts = 1
    if ITEMS:
        count = tl.load(counts_ptr)
        work_ptr += entry * 8
        slot, first_token, tokens = tl.load(work_ptr), tl.load(work_ptr + 1), tl.load(work_ptr + 2)
        kv_len, begin, end = tl.load(work_ptr + 3), tl.load(work_ptr + 4), tl.load(work_ptr + 5)
        first_item, num_parts = tl.load(work_ptr + 6), tl.load(work_ptr + 7)
        position = kv_len - tokens
    else:
        count = tl.load(counts_ptr + 1)
        work_ptr += entry * 4
        slot, first_token = tl.load(work_ptr), tl.load(work_ptr + 1)
        tokens, position = tl.load(work_ptr + 2), tl.load(work_ptr + 3)
        begin, end = 0, position + tokens
    if (entry >= count) | (first_pair >= tokens * HEADS):
        return
    if ITEMS:  # noqa: SIM102 (decided when compiling)
        if (entry == first_item) & (first_pair == 0):
            tl.store(whose_ptr + first_token * 2, first_item)
            tl.store(whose_ptr + first_token * 2 + 1, num_parts)

    real_M = token_M < tokens
    place_M = (first_token + token_M).to(tl.int64)
    position_M = position + token_M
    if TREE:
        bits_M, base_M, position_M = load_tree(bits_ptr, base_ptr, first_token + token_M, real_M, 0, False)
    q_M = place_M * stride_q_token + head_M.to(tl.int64) * stride_q_head
    rotated_M = place_M * stride_rotated_token + head_M.to(tl.int64) * stride_rotated_head
    q = load_vectors(q_ptr + q_M[:, None] + l_L[None, :], real_M[:, None], l_L[None, :], RANK, L)
    rotated = load_vectors(rotated_ptr + rotated_M[:, None] + y_Y[None, :], real_M[:, None], y_Y[None, :], ROPE, Y)
    q = columns_apart(multiplier(q, KV), QUERIES, L, KV)
    if KV is None:
        acc = tl.zeros((QUERIES, L), tl.float32)
    else:
        acc = tl.zeros((QUERIES, L // 2), tl.float32), tl.zeros((QUERIES, L // 2), tl.float32)
    max_M = tl.full((QUERIES,), LOWEST, tl.float32)
    sum_M = tl.zeros((QUERIES,), tl.float32)

    table_ptr += slot.to(tl.int64) * stride_table
    WORDS: tl.constexpr = 1 if KV is None else 2  # numbers of a word
    w_W = tl.arange(0, L // WORDS)
    place_J1 = place_in_blocks(stride_token, TILE, BLOCK_SIZE)[:, None]
    blocks = load_blocks(table_ptr, begin, end, TILE, BLOCK_SIZE)
    # All tiles are masked alike. The masks cost little beside products of such width, and a query's bits then do not
    # depend on the tokens beside it.
    for start in range(begin, end, TILE):
        key_J = start + n_J
        readable_J = key_J < end
        if TREE:
            seen_M = seen_of_tile(bits_M, base_M, position_M, start, 0, False)
            readable_J = readable_J & in_bits(tl.reduce(seen_M, 0, either), n_J)
        if BLOCK_SIZE % TILE == 0:
            kept_ptr = cache_ptr + (blocks.to(tl.int64) * stride_block + start % BLOCK_SIZE * stride_token)
        else:
            kept_ptr = cache_ptr + (blocks.to(tl.int64) * stride_block)[:, None]
        # Unseen cells become 0 and no more: 0 · NaN is NaN
        c_JW = load_vectors(
            kept_ptr + (place_J1 + w_W[None, :]), readable_J[:, None], w_W[None, :], RANK // WORDS, L // WORDS
        )
        if KV is None:
            scale_J = None
            r_ptr_JY = kept_ptr + (place_J1 + RANK + y_Y[None, :])
        else:
            block_J = blocks.to(tl.int64) + tl.zeros((TILE,), tl.int64)
            token_J = key_J % BLOCK_SIZE
            scale_J = tl.load(scale_ptr + block_J * stride_scale + token_J, mask=readable_J, other=0).to(tl.float32)
            r_ptr_JY = r_ptr + (block_J * stride_r + token_J * ROPE)[:, None] + y_Y[None, :]
        r_JY = load_vectors(r_ptr_JY, readable_J[:, None], y_Y[None, :], ROPE, Y)
        blocks = load_blocks(table_ptr, start + TILE, end, TILE, BLOCK_SIZE)  # before they are needed
        x = scores_of(q, c_JW, scale_J, KV, PDL)
        x = tl.dot(rotated, tl.trans(r_JY), x, input_precision="ieee") * scale
        visible = readable_J[None, :]
        if TREE:
            visible = visible & in_bits(seen_M[:, None], n_J[None, :])
        else:
            visible = visible & (key_J[None, :] <= position_M[:, None])
        x = tl.where(visible, x, -float("inf"))
        new_max_M = tl.maximum(max_M, tl.max(x, 1))
        p = tl.exp2(x - new_max_M[:, None])
        shrink_M = tl.exp2(max_M - new_max_M)
        sum_M = sum_M * shrink_M + tl.sum(p, 1)
        if KV is not None:
            scale_J = scale_J * unit(KV)
        acc = with_values(acc, shrink_M, p, c_JW, scale_J, q, KV, PDL)
        max_M = new_max_M

    share_M = tl.where(sum_M > 0, 1 / sum_M, 0)  # a stopped row may have queries that see nothing
    out_M = (place_M * HEADS + head_M) * RANK
    part_M = entry.to(tl.int64) * (TOKENS * HEADS) + pair_M
    acc = columns_joined(acc, QUERIES, L, KV) * share_M[:, None]
    out, part = out_M[:, None] + l_L[None, :], part_M[:, None] * RANK + l_L[None, :]
    stored = real_M[:, None] & (l_L < RANK)[None, :]
    if num_parts == 1:
        tl.store(out_ptr + out, acc.to(out_ptr.dtype.element_ty), mask=stored)
        if lse_ptr is not None:
            tl.store(lse_ptr + place_M * HEADS + head_M, (max_M + tl.log2(sum_M)) * LN2, mask=real_M)
    else:
        tl.store(parts_ptr + part, acc, mask=stored)
        tl.store(part_lse_ptr + part_M, max_M + tl.log2(sum_M), mask=real_M)


@triton.jit
def load_vectors(ptr, real, column, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Load vectors where they are real, and 0 elsewhere."""
    if WIDTH == PADDED:
        return tl.load(ptr, mask=real, other=0)
    else:
        return tl.load(ptr, mask=real & (column < WIDTH), other=0)


@triton.jit(do_not_specialize=["slices"])
def combine_kernel(
    out_ptr,
    lse_ptr,
    start_ptr,
    whose_ptr,
    parts_ptr,
    part_lse_ptr,
    slices,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add up the parts of a row that has several items, in the order of keys as PARTS running sums, for every slices-th
    COLUMNS of its columns. lse: as in `latent_kernel`."""
    row, slice = tl.program_id(0) // slices, tl.program_id(0) % slices
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first_token = tl.load(start_ptr + row).to(tl.int32)
    tokens = tl.load(start_ptr + row + 1).to(tl.int32) - first_token
    if (tokens == 0) | (tokens > TOKENS):
        return
    first_item, num_parts = tl.load(whose_ptr + first_token * 2), tl.load(whose_ptr + first_token * 2 + 1)
    if num_parts == 1:
        return
    p_I1 = tl.arange(0, PARTS)[:, None]
    columns = tokens * HEADS * RANK
    first_pair = first_item.to(tl.int64) * (TOKENS * HEADS)
    for first in range(slice * COLUMNS, columns, slices * COLUMNS):
        c_1C = first + tl.arange(0, COLUMNS)[None, :]
        real_1C = c_1C < columns
        max_IC = tl.full((PARTS, COLUMNS), LOWEST, tl.float32)
        sum_IC = tl.zeros((PARTS, COLUMNS), tl.float32)
        acc_IC = tl.zeros((PARTS, COLUMNS), tl.float32)
        for part in range(0, num_parts, PARTS):
            real_IC = (part + p_I1 < num_parts) & real_1C
            pair_I1 = first_pair + (part + p_I1) * (TOKENS * HEADS)
            x_IC = tl.load(part_lse_ptr + pair_I1 + c_1C // RANK, mask=real_IC, other=-float("inf"))
            out_IC = tl.load(parts_ptr + pair_I1 * RANK + c_1C, mask=real_IC, other=0)
            new_max_IC = tl.maximum(max_IC, x_IC)
            shrink_IC, weight_IC = tl.exp2(max_IC - new_max_IC), tl.exp2(x_IC - new_max_IC)
            sum_IC = sum_IC * shrink_IC + weight_IC
            acc_IC = acc_IC * shrink_IC + weight_IC * out_IC
            max_IC = new_max_IC
        weight_IC = tl.exp2(max_IC - tl.max(max_IC, 0)[None, :])
        sum_C = tl.sum(sum_IC * weight_IC, 0)
        out_C = tl.sum(acc_IC * weight_IC, 0) / tl.where(sum_C > 0, sum_C, 1)  # 0 where a stopped row sees nothing
        c_C = first + tl.arange(0, COLUMNS)
        if lse_ptr is not None:  # by the first column of each pair
            whole_C = (tl.max(max_IC, 0) + tl.log2(sum_C)) * LN2
            lse_ptr_C = lse_ptr + first_token.to(tl.int64) * HEADS + c_C // RANK
            tl.store(lse_ptr_C, whole_C, mask=(c_C < columns) & (c_C % RANK == 0))
        out_ptr_C = out_ptr + first_token.to(tl.int64) * (HEADS * RANK) + c_C
        tl.store(out_ptr_C, out_C.to(out_ptr.dtype.element_ty), mask=c_C < columns)
