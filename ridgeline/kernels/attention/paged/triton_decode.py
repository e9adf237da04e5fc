"""Attention of short rows: each program reads one stretch of a row's keys, for all queries that share a key head.

The kernel is bound by reading keys. Its products are computed transposed: keys (64 and more) are the rows of the matrix
product, and the few queries are its columns. So no rows of the tensor cores idle, and the warps share the keys instead
of reading the same ones.

The program that finishes a row last adds up the row's parts, in the order of the keys. With CASCADE the parts of the
keys that the row shares with others come first; an earlier launch has left them (triton_cascade.py).

Legend:
    M  queries (tokens times heads that share a key head), padded
    K  keys of a tile
    D  head width, padded
    W  words of a head: its elements, or pairs of levels
    E  queries whose parts are added up at once
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
from ridgeline.kernels.base.triton_levels import (
    e4m3_quotient,
    e4m3_scale,
    multiplier,
    rows_apart,
    rows_joined,
    taken_apart,
)


@triton.jit(do_not_specialize=["num_tokens"])
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    scale_ptr,
    out_ptr,
    out_scale_ptr,
    table_ptr,
    items_ptr,
    counts_ptr,
    arrivals_ptr,
    parts_ptr,
    part_lse_ptr,
    sinks_ptr,
    slopes_ptr,
    bits_ptr,
    base_ptr,
    ahead_ptr,
    shared_items_ptr,
    shared_parts_ptr,
    shared_lse_ptr,
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
    num_tokens,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    TOGETHER: tl.constexpr,
    PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    TREE: tl.constexpr,
    AHEAD: tl.constexpr,
    CASCADE: tl.constexpr,
    LSE: tl.constexpr,
    KV: tl.constexpr,
    ROUND: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend with the queries of one item and one key head.

    parts [items, G, FEW, GROUP, HEAD_DIM], part_lse [items, G, FEW, GROUP]: float32, the parts of rows that have
        several.
    shared_items, shared_parts, shared_lse: `Cascade.items_I3`, and the results of `shared_kernel`.
    lse: with LSE, float32 [T, H], the natural logarithms of the softmax's sums.
    QUERIES, DIM: FEW · GROUP and HEAD_DIM, rounded up to powers of two.
    TOGETHER, PARTS: of how many queries (a power of two, at least GROUP) to add up how many parts at once.
    TREE: queries see the keys of a tree, by bits and base, int64 [T].
    AHEAD: they see so many keys behind their own, int32 [T].
    KV: the format of the cache's levels, of which two are a word; None for a cache of plain numbers.
    ROUND: out is E4M3, with a scale for each head in out_scale, float32 [heads, tokens]. Heads are 128 wide.
    """
    item, g = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    m_M = tl.arange(0, QUERIES)
    d_D = tl.arange(0, DIM)
    n_K = tl.arange(0, TILE)
    token_M, head_M = m_M // GROUP, g * GROUP + m_M % GROUP
    slope_M = load_slopes(slopes_ptr, head_M, ALIBI)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    count = tl.load(counts_ptr)
    item_ptr = items_ptr + item * 8
    slot, first_token, tokens = tl.load(item_ptr), tl.load(item_ptr + 1), tl.load(item_ptr + 2)
    kv_len, begin, end = tl.load(item_ptr + 3), tl.load(item_ptr + 4), tl.load(item_ptr + 5)
    first_item, num_parts = tl.load(item_ptr + 6), tl.load(item_ptr + 7)
    num_shared = 0
    if CASCADE:
        shared_ptr = shared_items_ptr + item * 3
        shared_part, shared_step, num_shared = tl.load(shared_ptr), tl.load(shared_ptr + 1), tl.load(shared_ptr + 2)
    if item >= count:
        return

    real_M = token_M < tokens
    position_M = kv_len - tokens + token_M
    if TREE:
        bits_M, base_M, position_M = load_tree(bits_ptr, base_ptr, first_token + token_M, real_M, window, WINDOW)
    last_M = position_M
    if AHEAD:
        last_M += tl.load(ahead_ptr + first_token + token_M, mask=real_M, other=0)
    inside_D = d_D < HEAD_DIM
    q_M = (first_token + token_M).to(tl.int64) * stride_q_token + head_M * stride_q_head
    q_DM = tl.load(q_ptr + q_M[None, :] + d_D[:, None], mask=real_M[None, :] & inside_D[:, None], other=0)
    table_ptr += slot.to(tl.int64) * stride_table
    PAIR: tl.constexpr = 1 if KV is None else 2
    w_W = tl.arange(0, DIM // PAIR)
    inside_W = w_W < HEAD_DIM // PAIR
    place_K = place_in_blocks(stride_token, TILE, BLOCK_SIZE)
    k_ptr_KW = k_ptr + g * stride_head + (place_K[:, None] + w_W[None, :])
    v_ptr_KW = v_ptr + g * stride_head + (place_K[:, None] + w_W[None, :])
    v_ptr_WK = v_ptr + g * stride_head + (place_K[None, :] + w_W[:, None])
    if KV is not None:
        scale_ptr += g * stride_scale_head
    q = rows_apart(multiplier(q_DM, KV), DIM, QUERIES, KV)
    seen = begin
    if WINDOW:
        seen = tl.maximum(begin, kv_len - tokens - window + 1)

    max_M = tl.full((QUERIES,), LOWEST, tl.float32)
    sum_KM = tl.zeros((TILE, QUERIES), tl.float32)  # summed over the keys at the end, so warps meet once less per tile
    acc = rows_apart(tl.zeros((DIM, QUERIES), tl.float32), DIM, QUERIES, KV)
    if SINKS:  # noqa: SIM102 (decided when compiling)
        if item == first_item:
            max_M = tl.load(sinks_ptr + head_M, mask=real_M, other=0).to(tl.float32) * LOG2E
            sum_KM += (n_K == 0).to(tl.float32)[:, None]
    blocks = load_blocks(table_ptr, begin, end, TILE, BLOCK_SIZE)
    for start in range(begin, end, TILE):
        key_K = start + n_K
        readable_K = key_K < end
        if TREE:
            seen_M = seen_of_tile(bits_M, base_M, position_M, start, window, WINDOW)
            readable_K = readable_K & in_bits(tl.reduce(seen_M, 0, either), n_K)
        elif WINDOW:
            readable_K = readable_K & (key_K >= seen)
        far_K = place_of_blocks(blocks, start, stride_block, stride_token, TILE, BLOCK_SIZE)
        readable_KW = readable_K[:, None] & inside_W[None, :]
        k_KW = tl.load(k_ptr_KW + far_K[:, None], mask=readable_KW, other=0)
        if KV is None:
            v_WK = tl.trans(tl.load(v_ptr_KW + far_K[:, None], mask=readable_KW, other=0))
        else:  # levels go through registers, which would end the pipeline at a transposition
            readable_WK = readable_K[None, :] & inside_W[:, None]
            v_WK = tl.load(v_ptr_WK + far_K[None, :], mask=readable_WK, other=0)
        scales = load_scales(
            scale_ptr, blocks, start, readable_K, stride_scale_block, stride_scale_token,
            TILE, BLOCK_SIZE, KV,
        )  # fmt: skip
        blocks = load_blocks(table_ptr, start + TILE, end, TILE, BLOCK_SIZE)  # before they are needed
        visible_KM = readable_K[:, None]
        offset_KM = key_K[:, None] - position_M[None, :]
        if TREE:
            visible_KM = visible_KM & in_bits(seen_M[None, :], n_K[:, None])
            offset_KM = behind_in_tree(key_K[:, None], bits_M[None, :], base_M[None, :], position_M[None, :], ALIBI)
        elif FEW > 1:
            visible_KM = visible_KM & (key_K[:, None] <= last_M[None, :])
            if WINDOW:
                visible_KM = visible_KM & (key_K[:, None] > position_M[None, :] - window)
        max_M, sum_KM, acc = add_tile(
            k_KW, v_WK, scales, q, visible_KM, max_M, sum_KM, acc, scale, softcap,
            slope_M, offset_KM, SOFTCAP, ALIBI, KV, PDL,
        )  # fmt: skip

    sum_M = tl.sum(sum_KM, 0)
    acc_DM = rows_joined(acc, DIM, QUERIES, KV)
    acc_DM *= tl.where(sum_M > 0, 1 / sum_M, 0)[None, :]
    stored_DM = real_M[None, :] & inside_D[:, None]
    out_ptr += first_token.to(tl.int64) * (NUM_KV_HEADS * GROUP * HEAD_DIM)
    out_M = (token_M * NUM_KV_HEADS * GROUP + head_M) * HEAD_DIM
    if num_parts + num_shared == 1:
        if ROUND:
            scale_M = e4m3_scale(acc_DM, 0)
            tl.store(out_scale_ptr + head_M * num_tokens + first_token + token_M, scale_M, mask=real_M)
            acc_DM = e4m3_quotient(acc_DM, scale_M[None, :])
        tl.store(out_ptr + out_M[None, :] + d_D[:, None], acc_DM.to(out_ptr.dtype.element_ty), mask=stored_DM)
        if LSE:
            lse_M = (first_token + token_M).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head_M
            tl.store(lse_ptr + lse_M, (max_M + tl.log2(sum_M)) / LOG2E, mask=real_M)
    else:
        part_M = (item.to(tl.int64) * NUM_KV_HEADS + g) * (FEW * GROUP) + m_M
        tl.store(parts_ptr + part_M[None, :] * HEAD_DIM + d_D[:, None], acc_DM, mask=stored_DM)
        tl.store(part_lse_ptr + part_M, max_M + tl.log2(sum_M), mask=real_M)
        tl.debug_barrier()  # all threads' stores come before the one thread's atomic, which releases them
        arrived = tl.atomic_add(arrivals_ptr + first_item * NUM_KV_HEADS + g, 1, sem="acq_rel")
        if arrived == num_parts - 1:
            tl.debug_barrier()
            tl.store(arrivals_ptr + first_item * NUM_KV_HEADS + g, 0)  # for the next layer
            for first in range(0, tokens * GROUP, TOGETHER):
                m_E1, d_1D = first + tl.arange(0, TOGETHER)[:, None], tl.arange(0, DIM)[None, :]
                max_E1 = tl.full((TOGETHER, 1), LOWEST, tl.float32)
                sum_E1 = tl.zeros((TOGETHER, 1), tl.float32)
                acc_ED = tl.zeros((TOGETHER, DIM), tl.float32)
                left = tokens * GROUP - first
                if CASCADE:  # rows that share keys have one token
                    max_E1, sum_E1, acc_ED = add_parts(
                        max_E1,
                        sum_E1,
                        acc_ED,
                        shared_parts_ptr,
                        shared_lse_ptr,
                        (shared_part.to(tl.int64) * NUM_KV_HEADS + g) * GROUP,
                        shared_step * (NUM_KV_HEADS * GROUP),
                        num_shared,
                        left,
                        HEAD_DIM,
                        TOGETHER,
                        DIM,
                        PARTS,
                    )
                max_E1, sum_E1, acc_ED = add_parts(
                    max_E1,
                    sum_E1,
                    acc_ED,
                    parts_ptr,
                    part_lse_ptr,
                    (first_item.to(tl.int64) * NUM_KV_HEADS + g) * (FEW * GROUP) + first,
                    NUM_KV_HEADS * FEW * GROUP,
                    num_parts,
                    left,
                    HEAD_DIM,
                    TOGETHER,
                    DIM,
                    PARTS,
                )
                real_E1 = m_E1 < tokens * GROUP
                acc_ED = acc_ED / tl.where(real_E1, sum_E1, 1)
                token_E1, head_E1 = m_E1 // GROUP, g * GROUP + m_E1 % GROUP
                out_ED = out_ptr + (token_E1 * NUM_KV_HEADS * GROUP + head_E1) * HEAD_DIM + d_1D
                if ROUND:
                    scale_E1 = e4m3_scale(acc_ED, 1)[:, None]
                    at_E1 = head_E1 * num_tokens + first_token + token_E1
                    tl.store(out_scale_ptr + at_E1, scale_E1, mask=real_E1)
                    acc_ED = e4m3_quotient(acc_ED, scale_E1)
                tl.store(out_ED, acc_ED.to(out_ptr.dtype.element_ty), mask=real_E1 & (d_1D < HEAD_DIM))
                if LSE:
                    lse_E1 = (first_token + token_E1).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head_E1
                    tl.store(lse_ptr + lse_E1, (max_E1 + tl.log2(sum_E1)) / LOG2E, mask=real_E1)


@triton.jit
def add_tile(
    k_KW, v_WK, scales, q, visible_KM, max_M, sum_KM, acc, scale, softcap,
    slope_M, offset_KM, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, KV: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add one more tile of keys to the running softmax: (maximum, sums over every TILE-th key, weighted values).

    scales: the keys' and the values' [K], if these are levels.
    q, acc: tensors [D, M]; with levels the even elements of heads and the odd ones.
    offset: the distance of keys from queries, as in `nearer`, in a shape that broadcasts.
    """
    if KV is None:
        x_KM = tl.dot(k_KW.to(q.dtype), q, input_precision="ieee")
    else:
        k_even, k_odd = taken_apart(k_KW, q[0], KV, ASM)
        x_KM = tl.dot(k_even, q[0], input_precision="ieee")
        x_KM = tl.dot(k_odd, q[1], x_KM, input_precision="ieee") * scales[0][:, None]
    x_KM = logits(x_KM, scale, softcap, SOFTCAP)
    x_KM = nearer(x_KM, slope_M[None, :], offset_KM, ALIBI)
    x_KM = tl.where(visible_KM, x_KM, -float("inf"))
    new_max_M = tl.maximum(max_M, tl.max(x_KM, 0))
    p_KM = tl.exp2(x_KM - new_max_M[None, :])
    shrink_M = tl.exp2(max_M - new_max_M)
    sum_KM = sum_KM * shrink_M[None, :] + p_KM
    if KV is None:
        v_WK = v_WK.to(q.dtype)
        return new_max_M, sum_KM, tl.dot(v_WK, p_KM.to(v_WK.dtype), acc * shrink_M[None, :], input_precision="ieee")
    else:
        v_even, v_odd = taken_apart(v_WK, q[0], KV, ASM)
        p_KM = (p_KM * scales[1][:, None]).to(v_even.dtype)
        even_DM = tl.dot(v_even, p_KM, acc[0] * shrink_M[None, :], input_precision="ieee")
        odd_DM = tl.dot(v_odd, p_KM, acc[1] * shrink_M[None, :], input_precision="ieee")
        return new_max_M, sum_KM, (even_DM, odd_DM)


@triton.jit
def add_parts(
    max_E1,
    sum_E1,
    acc_ED,
    parts_ptr,
    part_lse_ptr,
    first,
    stride_part,
    num_parts,
    queries,
    HEAD_DIM: tl.constexpr,
    TOGETHER: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Add parts to the running sums of up to TOGETHER queries' outputs. Each part is weighted by its share of the
    softmax."""
    j_E1, d_1D = tl.arange(0, TOGETHER)[:, None], tl.arange(0, DIM)[None, :]
    inside_E1 = j_E1 < queries
    for start in range(0, num_parts, PARTS):
        part_lse_E1 = part_lse_ptr + first + start * stride_part + j_E1
        part_ED = parts_ptr + (first + start * stride_part + j_E1) * HEAD_DIM + d_1D
        lses, outs = (), ()
        for i in tl.static_range(PARTS):  # unrolled, so that all loads are under way before the first arrives
            real_E1 = inside_E1 & (j_E1 < (num_parts - start - i) * TOGETHER)  # true for all of a part, or for none
            real_ED = real_E1 & (d_1D < HEAD_DIM)
            lse_ptr_E1, out_ptr_ED = part_lse_E1 + i * stride_part, part_ED + i * stride_part * HEAD_DIM
            lse_E1 = tl.load(lse_ptr_E1, mask=real_E1, other=-float("inf"), cache_modifier=".cg")
            out_ED = tl.load(out_ptr_ED, mask=real_ED, other=0, cache_modifier=".cg")
            lses = lses + (lse_E1,)  # type: ignore[assignment]  # noqa: RUF005 (the form that Triton knows)
            outs = outs + (out_ED,)  # type: ignore[assignment]  # noqa: RUF005
        new_max_E1 = max_E1
        for i in tl.static_range(PARTS):
            new_max_E1 = tl.maximum(new_max_E1, lses[i])
        shrink_E1 = tl.exp2(max_E1 - new_max_E1)
        sum_E1 *= shrink_E1
        acc_ED *= shrink_E1
        for i in tl.static_range(PARTS):
            weight_E1 = tl.exp2(lses[i] - new_max_E1)
            sum_E1 += weight_E1
            acc_ED += weight_E1 * outs[i]
        max_E1 = new_max_E1
    return max_E1, sum_E1, acc_ED
