"""Attention of long rows: FlashAttention-2 (arXiv 2307.08691) over a tile of queries, with keys read through the block
table.

The kernel is bound by arithmetic. A tile packs all heads that share a key head beside its tokens. So every key is read
once for all of them, and few of the tile's tokens lie beside the diagonal. Keys that all queries of the tile see need
no mask. The others come before them (a window's edge) and after them (the diagonal).

Legend:
    M  queries (tokens times heads that share a key head), padded
    K  keys of a tile
    D  head width, padded
    W  words of a head: its elements, or pairs of levels
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.attention.paged.triton_common import (
    LOG2E,
    LOWEST,
    behind_in_tree,
    either,
    in_bits,
    load_blocks,
    load_scales,
    load_slopes,
    load_tree,
    logits,
    nearer,
    place_in_blocks,
    place_of_blocks,
    seen_of_tile,
)
from ridgeline.kernels.base.triton_levels import columns_apart, columns_joined, multiplier, scores_of, with_values


@triton.jit
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    scale_ptr,
    out_ptr,
    table_ptr,
    tiles_ptr,
    counts_ptr,
    sinks_ptr,
    slopes_ptr,
    bits_ptr,
    base_ptr,
    ahead_ptr,
    lse_ptr,
    scale,
    softcap,
    window,
    stride_q_token,
    stride_q_head,
    stride_block,
    stride_head,
    stride_token,
    stride_table,
    stride_scale_block,
    stride_scale_head,
    stride_scale_token,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    TREE: tl.constexpr,
    AHEAD: tl.constexpr,
    FIXED: tl.constexpr,  # treat all keys by the masked loop's instructions, since the others round differently
    LSE: tl.constexpr,
    KV: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend with the queries of one tile and one key head.

    TREE: queries see the keys of a tree, by bits and base, int64 [T].
    AHEAD: they see so many keys behind their own, int32 [T].
    LSE: write the natural logarithms of the softmax's sums to lse, float32 [T, H].
    KV: the format of the cache's levels, of which two are a word; None for a cache of plain numbers.
    """
    tile, g = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    m_M = tl.arange(0, QUERIES)
    d_D = tl.arange(0, DIM)
    token_M, head_M = m_M // GROUP, g * GROUP + m_M % GROUP
    slope_M = load_slopes(slopes_ptr, head_M, ALIBI)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    count = tl.load(counts_ptr + 1)
    tile_ptr = tiles_ptr + tile * 4
    slot, first_token = tl.load(tile_ptr), tl.load(tile_ptr + 1)
    tokens, position = tl.load(tile_ptr + 2), tl.load(tile_ptr + 3)
    if tile >= count:
        return

    real_MD = (token_M < tokens)[:, None] & (d_D < HEAD_DIM)[None, :]
    q_M = (first_token + token_M).to(tl.int64) * stride_q_token + head_M * stride_q_head
    q_MD = tl.load(q_ptr + q_M[:, None] + d_D[None, :], mask=real_MD, other=0)
    position_M = position + tl.minimum(token_M, tokens - 1)
    table_ptr += slot.to(tl.int64) * stride_table
    k_ptr += g * stride_head
    v_ptr += g * stride_head
    if KV is not None:
        scale_ptr += g * stride_scale_head
    q = columns_apart(multiplier(q_MD, KV), QUERIES, DIM, KV)

    max_M = tl.full((QUERIES,), LOWEST, tl.float32)
    sum_M = tl.zeros((QUERIES,), tl.float32)
    acc = columns_apart(tl.zeros((QUERIES, DIM), tl.float32), QUERIES, DIM, KV)
    if SINKS:
        max_M = tl.load(sinks_ptr + head_M).to(tl.float32) * LOG2E
        sum_M += 1

    end = position + tokens
    end_position = end
    last_M = position_M
    tree = (position_M, position_M)  # not read
    end_full = (position + 1) // TILE * TILE
    if TREE:
        real_M = token_M < tokens
        bits_M, base_M, position_M = load_tree(bits_ptr, base_ptr, first_token + token_M, real_M, window, WINDOW)
        tree = (bits_M, base_M)
        end_full = tl.min(tl.where(real_M, base_M, end), 0) // TILE * TILE
        position = tl.min(tl.where(real_M, position_M, end), 0)
        end_position = tl.max(position_M, 0) + 1
        last_M = position_M
    if AHEAD:
        last_M += tl.load(ahead_ptr + first_token + token_M, mask=token_M < tokens, other=0)
        end = tl.max(last_M, 0) + 1
    first_key = 0
    first_full = 0
    if WINDOW:
        first_key = tl.maximum(position - window + 1, 0)
        first_full = tl.minimum(tl.cdiv(tl.maximum(end_position - window, 0), TILE) * TILE, end_full)
        max_M, sum_M, acc = _attend(
            max_M, sum_M, acc, q, k_ptr, v_ptr, scale_ptr, table_ptr, position_M, last_M, slope_M, tree,
            first_key // TILE * TILE, first_full, first_key, end, scale, softcap, window, stride_block, stride_token,
        stride_scale_block, stride_scale_token,
            HEAD_DIM, DIM, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, ALIBI, TREE, True, KV, PDL,
        )  # fmt: skip
    max_M, sum_M, acc = _attend(
        max_M, sum_M, acc, q, k_ptr, v_ptr, scale_ptr, table_ptr, position_M, last_M, slope_M, tree,
        first_full, end_full, first_key, end, scale, softcap, window, stride_block, stride_token,
        stride_scale_block, stride_scale_token,
        HEAD_DIM, DIM, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, ALIBI, TREE, FIXED, KV, PDL,
    )  # fmt: skip
    max_M, sum_M, acc = _attend(
        max_M, sum_M, acc, q, k_ptr, v_ptr, scale_ptr, table_ptr, position_M, last_M, slope_M, tree,
        end_full, end, first_key, end, scale, softcap, window, stride_block, stride_token,
        stride_scale_block, stride_scale_token,
        HEAD_DIM, DIM, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, ALIBI, TREE, True, KV, PDL,
    )  # fmt: skip

    if TREE:  # queries beyond the tile's tokens see nothing
        sum_M = tl.where(sum_M > 0, sum_M, 1)
    acc_MD = columns_joined(acc, QUERIES, DIM, KV) / sum_M[:, None]
    out_M = ((first_token + token_M).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head_M) * HEAD_DIM
    tl.store(out_ptr + out_M[:, None] + d_D[None, :], acc_MD.to(out_ptr.dtype.element_ty), mask=real_MD)
    if LSE:
        lse_M = (first_token + token_M).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head_M
        tl.store(lse_ptr + lse_M, (max_M + tl.log2(sum_M)) / LOG2E, mask=token_M < tokens)


@triton.jit
def _attend(
    max_M,
    sum_M,
    acc,
    q,
    k_ptr,
    v_ptr,
    scale_ptr,
    table_ptr,
    position_M,
    last_M,
    slope_M,
    tree,
    begin,
    stop,
    first_key,
    end,
    scale,
    softcap,
    window,
    stride_block,
    stride_token,
    stride_scale_block,
    stride_scale_token,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    TREE: tl.constexpr,
    MASKED: tl.constexpr,
    KV: tl.constexpr,
    ASM: tl.constexpr,
):
    """Add key tiles begin … stop to the running softmax. Only keys first_key … end are read, which matters only if
    MASKED. last: the last keys that queries see, without TREE. tree: with TREE, the queries' bits and bases."""
    PAIR: tl.constexpr = 1 if KV is None else 2
    n_K, w_W = tl.arange(0, TILE), tl.arange(0, DIM // PAIR)
    inside_W = w_W < HEAD_DIM // PAIR
    place_KW = place_in_blocks(stride_token, TILE, BLOCK_SIZE)[:, None] + w_W[None, :]
    k_ptr_KW, v_ptr_KW = k_ptr + place_KW, v_ptr + place_KW
    blocks = load_blocks(table_ptr, begin, end, TILE, BLOCK_SIZE)
    for start in range(begin, stop, TILE):
        key_K = start + n_K
        place_K1 = place_of_blocks(blocks, start, stride_block, stride_token, TILE, BLOCK_SIZE)[:, None]
        if MASKED:
            readable_K = (key_K < end) & (key_K >= first_key)
            if TREE:
                seen_M = seen_of_tile(tree[0], tree[1], position_M, start, window, WINDOW)
                readable_K = readable_K & in_bits(tl.reduce(seen_M, 0, either), n_K)
            k_KW = tl.load(k_ptr_KW + place_K1, mask=readable_K[:, None] & inside_W[None, :], other=0)
            v_KW = tl.load(v_ptr_KW + place_K1, mask=readable_K[:, None] & inside_W[None, :], other=0)
        elif HEAD_DIM == DIM:
            readable_K = n_K < TILE
            k_KW = tl.load(k_ptr_KW + place_K1)
            v_KW = tl.load(v_ptr_KW + place_K1)
        else:
            readable_K = n_K < TILE
            k_KW = tl.load(k_ptr_KW + place_K1, mask=inside_W[None, :], other=0)
            v_KW = tl.load(v_ptr_KW + place_K1, mask=inside_W[None, :], other=0)
        k_scale_K, v_scale_K = load_scales(
            scale_ptr, blocks, start, readable_K, stride_scale_block, stride_scale_token,
            TILE, BLOCK_SIZE, KV,
        )  # fmt: skip
        blocks = load_blocks(table_ptr, start + TILE, end, TILE, BLOCK_SIZE)  # before they are needed
        x_MK = scores_of(q, k_KW, k_scale_K, KV, ASM)
        if MASKED:
            x_MK = logits(x_MK, scale, softcap, SOFTCAP)
            offset_MK = key_K[None, :] - position_M[:, None]
            if TREE:
                offset_MK = behind_in_tree(
                    key_K[None, :], tree[0][:, None], tree[1][:, None], position_M[:, None], ALIBI
                )
                visible_MK = in_bits(seen_M[:, None], n_K[None, :])
            else:
                visible_MK = key_K[None, :] <= last_M[:, None]
                if WINDOW:
                    visible_MK = visible_MK & (key_K[None, :] > position_M[:, None] - window)
            x_MK = nearer(x_MK, slope_M[:, None], offset_MK, ALIBI)
            x_MK = tl.where(visible_MK, x_MK, -float("inf"))
            new_max_M = tl.maximum(max_M, tl.max(x_MK, 1))
            p_MK = tl.exp2(x_MK - new_max_M[:, None])
        elif SOFTCAP or ALIBI:
            x_MK = logits(x_MK, scale, softcap, SOFTCAP)
            x_MK = nearer(x_MK, slope_M[:, None], key_K[None, :] - position_M[:, None], ALIBI)
            new_max_M = tl.maximum(max_M, tl.max(x_MK, 1))
            p_MK = tl.exp2(x_MK - new_max_M[:, None])
        else:  # scaling and subtraction in one instruction
            new_max_M = tl.maximum(max_M, tl.max(x_MK, 1) * scale)
            p_MK = tl.exp2(x_MK * scale - new_max_M[:, None])
        shrink_M = tl.exp2(max_M - new_max_M)
        sum_M = sum_M * shrink_M + tl.sum(p_MK, 1)
        acc = with_values(acc, shrink_M, p_MK, v_KW, v_scale_K, q, KV, ASM)
        max_M = new_max_M
    return max_M, sum_M, acc
