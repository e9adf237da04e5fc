"""A decode step's attention in one launch, from the fused projection on: heads are normalised and rotated, the newest
key and value are stored, and all keys are attended to. The work is cut as in triton_decode.py, and most of it is done
by functions of that file.

Each program rotates its own queries, since that costs less than a launch. The newest key and value never come from the
cache: the program that reads a row's last stretch has them in registers, begins its sums with them, and stores them. So
everything that is read from the cache is old, and a program begins to read while the product before it still runs (rule
4 in kernels/base/launch.py). When the projection arrives, the first tile of keys and values is there.

Legend:
    M  queries (heads that share a key head), padded
    K  keys of a tile
    D  head width, padded
    W  words of a head: its elements, or pairs of levels
    E  heads that share a key head, padded
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.attention.paged.triton_common import (
    LOG2E,
    LOWEST,
    held,
    load_blocks,
    load_scales,
    load_slopes,
    logits,
    place_in_blocks,
    place_of_blocks,
)
from ridgeline.kernels.attention.paged.triton_decode import add_parts, add_tile
from ridgeline.kernels.base.triton_levels import (
    e4m3_quotient,
    e4m3_scale,
    largest_level,
    levels,
    magnitude,
    multiplier,
    row_scale,
    rows_apart,
    rows_joined,
    unit,
    value_of,
)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["positions_ptr", "place_ptr"])
def fused_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_sin_ptr,
    positions_ptr,
    place_ptr,
    k_ptr,
    v_ptr,
    scale_ptr,
    saturated_ptr,
    out_ptr,
    out_scale_ptr,
    table_ptr,
    items_ptr,
    arrivals_ptr,
    parts_ptr,
    part_lse_ptr,
    sinks_ptr,
    slopes_ptr,
    eps,
    scale,
    softcap,
    window,
    stride_qkv,
    stride_block,
    stride_head,
    stride_token,
    stride_table,
    stride_scale_block,
    stride_scale_head,
    stride_scale_token,
    num_rows,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    V_NORM: tl.constexpr,
    VALUES_ARE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    KV: tl.constexpr,
    ROUND: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend with the queries of one item and one key head.

    parts [items, G, GROUP, HEAD_DIM], part_lse [items, G, GROUP]: float32.
    ROTATED: the rotated width; 0 for no rotation.
    KV: the format of the cache's levels, of which two are a word; None for a cache of plain numbers.
    ROUND: out is E4M3, with a scale for each head in out_scale, float32 [heads, rows]. Heads are 128 wide.
    """
    if PDL:
        gdc_launch_dependents()
    item, g = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    item_ptr = items_ptr + item * 8
    slot, token, kv_len = tl.load(item_ptr), tl.load(item_ptr + 1), tl.load(item_ptr + 3)
    begin, end = tl.load(item_ptr + 4), tl.load(item_ptr + 5)
    first_item, num_parts = tl.load(item_ptr + 6), tl.load(item_ptr + 7)
    if kv_len == 0:  # no item. This program need not wait: other programs of the launch do, since every row has a token
        return

    m_M, d_D, n_K = tl.arange(0, QUERIES), tl.arange(0, DIM), tl.arange(0, TILE)
    d_DM = tl.broadcast_to(d_D[:, None], (DIM, QUERIES))  # the full shape, so that all loads of heads get one layout
    real_M = m_M < GROUP
    has_newest = end == kv_len
    end = tl.minimum(end, kv_len - 1)
    seen = begin
    if WINDOW:
        seen = tl.maximum(begin, kv_len - window)

    table_ptr += slot.to(tl.int64) * stride_table
    k_ptr += g * stride_head
    v_ptr += g * stride_head
    if KV is not None:
        scale_ptr += g * stride_scale_head
    PAIR: tl.constexpr = 1 if KV is None else 2
    blocks = load_blocks(table_ptr, begin, end, TILE, BLOCK_SIZE)
    k_KW, v_WK, visible_K = load_tile(
        k_ptr, v_ptr, blocks, begin, seen, end, stride_block, stride_token,
        HEAD_DIM // PAIR, DIM // PAIR, TILE, BLOCK_SIZE,
    )  # fmt: skip
    scales = load_scales(
        scale_ptr, blocks, begin, visible_K, stride_scale_block, stride_scale_token, TILE, BLOCK_SIZE, KV
    )
    blocks = load_blocks(table_ptr, begin + TILE, end, TILE, BLOCK_SIZE)
    place = tl.load(place_ptr + token)
    angle_ptr = cos_sin_ptr
    if ROTATED > 0:
        angle_ptr += tl.load(positions_ptr + token).to(tl.int64) * ROTATED
    angles = load_angles(angle_ptr, d_DM, ROTATED)
    q_weights = load_weights(q_norm_ptr, d_DM, HEAD_DIM, ROTATED, NORM)
    k_weights = load_weights(k_norm_ptr, d_DM, HEAD_DIM, ROTATED, NORM)
    slope_M = load_slopes(slopes_ptr, g * GROUP + m_M % GROUP, ALIBI)
    if PDL:
        gdc_wait()

    heads_ptr = qkv_ptr + token.to(tl.int64) * stride_qkv + g * HEAD_DIM
    q_ptr_1M = heads_ptr + (g * (GROUP - 1) + m_M[None, :]) * HEAD_DIM
    k_new_ptr = heads_ptr + NUM_KV_HEADS * GROUP * HEAD_DIM
    real_DM = (d_DM < HEAD_DIM) & real_M[None, :]
    newest_DM = (d_DM < tl.where(has_newest, HEAD_DIM, 0)) & real_M[None, :]  # columns of padding are not loaded
    v_new_ptr = k_new_ptr
    if not VALUES_ARE_KEYS:
        v_new_ptr += NUM_KV_HEADS * HEAD_DIM
    v_DM = tl.load(v_new_ptr + d_DM, mask=newest_DM, other=0)
    if V_NORM:
        v_DM = (v_DM.to(tl.float32) * inverse_rms(v_DM, eps, HEAD_DIM)).to(v_DM.dtype)
    k_DM, k_partner_DM = load_head(k_new_ptr, d_DM, newest_DM, ROTATED)
    q_DM, q_partner_DM = load_head(q_ptr_1M, d_DM, real_DM, ROTATED)
    k_DM = rotated(k_DM, k_partner_DM, k_weights, angles, eps, HEAD_DIM, ROTATED, NORM)
    q_DM = rotated(q_DM, q_partner_DM, q_weights, angles, eps, HEAD_DIM, ROTATED, NORM)
    stored_DM = newest_DM & (m_M == 0)[None, :]
    new_place = place // BLOCK_SIZE * stride_block + place % BLOCK_SIZE * stride_token
    if KV is None:
        tl.store(k_ptr + new_place + d_DM, k_DM, mask=stored_DM)
        tl.store(v_ptr + new_place + d_DM, v_DM, mask=stored_DM)
    else:
        new_scale_ptr = scale_ptr + place // BLOCK_SIZE * stride_scale_block + place % BLOCK_SIZE * stride_scale_token
        k_DM, v_DM = store_levels(
            k_DM, v_DM, k_ptr, v_ptr, new_place * 2 + d_DM, new_scale_ptr, saturated_ptr, stored_DM, KV
        )

    # The sums begin with the newest key, which is at distance 0, or with nothing
    x_M = logits(tl.sum(q_DM.to(tl.float32) * k_DM.to(tl.float32), 0), scale, softcap, SOFTCAP)
    max_M = tl.where(has_newest, x_M, LOWEST)
    weight_M = tl.where(has_newest, 1.0, 0.0) + tl.zeros((QUERIES,), tl.float32)
    acc_DM = v_DM.to(tl.float32) * unit(KV)
    if SINKS:  # noqa: SIM102 (decided when compiling)
        if item == first_item:
            sink_M = tl.load(sinks_ptr + g * GROUP + m_M, mask=real_M, other=0).to(tl.float32) * LOG2E
            new_max_M = tl.maximum(max_M, sink_M)
            shrink_M = tl.exp2(max_M - new_max_M)
            weight_M = weight_M * shrink_M + tl.exp2(sink_M - new_max_M)
            acc_DM *= shrink_M[None, :]
            max_M = new_max_M
    sum_KM = tl.where((n_K == 0)[:, None], weight_M[None, :], 0.0)  # summed over the keys at the end
    if PDL:
        # With this nothing waits for the tile before here, and the products take it from registers. (If they take it
        # from shared memory, the weights of the softmax later lie in the keys' place, and ptxas 12.8 takes the
        # weights' descriptor from a register that it never writes.)
        k_KW, v_WK = held(k_KW), held(v_WK)
    offset_K = n_K - (kv_len - 1)  # offsets of the keys of a tile that starts at 0
    q, acc = rows_apart(multiplier(q_DM, KV), DIM, QUERIES, KV), rows_apart(acc_DM, DIM, QUERIES, KV)
    max_M, sum_KM, acc = add_tile(
        k_KW, v_WK, scales, q, visible_K[:, None], max_M, sum_KM, acc, scale, softcap,
        slope_M, (begin + offset_K)[:, None], SOFTCAP, ALIBI, KV, PDL,
    )  # fmt: skip
    if begin + TILE < end:  # since a pipeline takes time even if it runs no step
        for start in range(begin + TILE, end, TILE):
            k_KW, v_WK, visible_K = load_tile(
                k_ptr, v_ptr, blocks, start, seen, end, stride_block, stride_token,
                HEAD_DIM // PAIR, DIM // PAIR, TILE, BLOCK_SIZE,
            )  # fmt: skip
            scales = load_scales(
                scale_ptr, blocks, start, visible_K, stride_scale_block, stride_scale_token, TILE, BLOCK_SIZE, KV
            )
            blocks = load_blocks(table_ptr, start + TILE, end, TILE, BLOCK_SIZE)
            max_M, sum_KM, acc = add_tile(
                k_KW, v_WK, scales, q, visible_K[:, None], max_M, sum_KM, acc, scale, softcap,
                slope_M, (start + offset_K)[:, None], SOFTCAP, ALIBI, KV, PDL,
            )  # fmt: skip

    sum_M = tl.sum(sum_KM, 0)
    acc_DM = rows_joined(acc, DIM, QUERIES, KV)
    acc_DM *= tl.where(sum_M > 0, 1 / sum_M, 0)[None, :]
    out_ptr += (token.to(tl.int64) * NUM_KV_HEADS + g) * (GROUP * HEAD_DIM)
    if num_parts == 1:
        out_DM = out_ptr + m_M[None, :] * HEAD_DIM + d_DM
        if ROUND:
            scale_M = e4m3_scale(acc_DM, 0)
            tl.store(out_scale_ptr + (g * GROUP + m_M) * num_rows + token, scale_M, mask=real_M)
            acc_DM = e4m3_quotient(acc_DM, scale_M[None, :])
        tl.store(out_DM, acc_DM.to(out_ptr.dtype.element_ty), mask=real_DM)
    else:
        part_M = (item.to(tl.int64) * NUM_KV_HEADS + g) * GROUP + m_M
        tl.store(parts_ptr + part_M[None, :] * HEAD_DIM + d_DM, acc_DM, mask=real_DM)
        tl.store(part_lse_ptr + part_M, max_M + tl.log2(sum_M), mask=real_M)
        tl.debug_barrier()  # all threads' stores come before the one thread's atomic, which releases them
        arrived = tl.atomic_add(arrivals_ptr + first_item * NUM_KV_HEADS + g, 1, sem="acq_rel")
        if arrived == num_parts - 1:
            tl.debug_barrier()
            tl.store(arrivals_ptr + first_item * NUM_KV_HEADS + g, 0)  # for the next layer
            j_E1, d_1D = tl.arange(0, HEADS)[:, None], d_D[None, :]
            _, sum_E1, acc_ED = add_parts(
                tl.full((HEADS, 1), LOWEST, tl.float32),
                tl.zeros((HEADS, 1), tl.float32),
                tl.zeros((HEADS, DIM), tl.float32),
                parts_ptr,
                part_lse_ptr,
                (first_item.to(tl.int64) * NUM_KV_HEADS + g) * GROUP,
                NUM_KV_HEADS * GROUP,
                num_parts,
                GROUP,
                HEAD_DIM,
                HEADS,
                DIM,
                PARTS,
            )
            acc_ED = acc_ED / sum_E1
            stored_ED = (j_E1 < GROUP) & (d_1D < HEAD_DIM)
            if ROUND:
                scale_E1 = e4m3_scale(acc_ED, 1)[:, None]
                tl.store(out_scale_ptr + (g * GROUP + j_E1) * num_rows + token, scale_E1, mask=j_E1 < GROUP)
                acc_ED = e4m3_quotient(acc_ED, scale_E1)
            tl.store(out_ptr + j_E1 * HEAD_DIM + d_1D, acc_ED.to(out_ptr.dtype.element_ty), mask=stored_ED)


@triton.jit
def load_tile(
    k_ptr,
    v_ptr,
    blocks,
    start,
    seen,
    end,
    stride_block,
    stride_token,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Return a tile's keys, its values, and which of them are visible: those from `seen` to `end`. The others are zero.

    HEAD_DIM, DIM: in words.

    Values are loaded in the shape that the product wants. If they were transposed afterwards, in registers, the
    compiler would not let products of single warps take them from a pipeline.
    """
    d_D, key_K = tl.arange(0, DIM), start + tl.arange(0, TILE)
    place_K = place_of_blocks(blocks, start, stride_block, stride_token, TILE, BLOCK_SIZE)
    in_block_K = place_in_blocks(stride_token, TILE, BLOCK_SIZE)
    visible_K, real_D = (key_K >= seen) & (key_K < end), d_D < HEAD_DIM
    k_ptr_KD = k_ptr + (in_block_K[:, None] + d_D[None, :]) + place_K[:, None]
    v_ptr_DK = v_ptr + (in_block_K[None, :] + d_D[:, None]) + place_K[None, :]
    k_KD = tl.load(k_ptr_KD, mask=visible_K[:, None] & real_D[None, :], other=0)
    v_DK = tl.load(v_ptr_DK, mask=visible_K[None, :] & real_D[:, None], other=0)
    return k_KD, v_DK, visible_K


@triton.jit
def store_levels(
    k_DM, v_DM, k_ptr, v_ptr, place_DM, scale_ptr, saturated_ptr, stored_DM, KV: tl.constexpr
):  # fmt: skip
    """Store the newest key and value as levels, and their scales if these are the row's own. Returns the numbers that
    the levels stand for, in float32: the row's own query sees its newest token as all later readers of the cache will.

    place: in bytes.
    """
    k_DM, v_DM = k_DM.to(tl.float32), v_DM.to(tl.float32)
    if saturated_ptr is None:
        k_scale_M = row_scale(tl.max(magnitude(k_DM), 0), KV)
        v_scale_M = row_scale(tl.max(magnitude(v_DM), 0), KV)
        low_M = (k_scale_M.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
        word_M = low_M | v_scale_M.to(tl.int32, bitcast=True)
        tl.store(scale_ptr + 0 * word_M, word_M, mask=tl.max(stored_DM.to(tl.int32), 0) > 0)
        k_DM, v_DM = k_DM / k_scale_M[None, :], v_DM / v_scale_M[None, :]
    else:
        most: tl.constexpr = largest_level(KV)
        k_scale_M, v_scale_M = tl.load(scale_ptr), tl.load(scale_ptr + 1)
        k_DM, v_DM = k_DM / k_scale_M, v_DM / v_scale_M
        beyond_DM = (tl.abs(k_DM) > most).to(tl.int32) + (tl.abs(v_DM) > most).to(tl.int32)
        beyond = tl.sum(tl.where(stored_DM, beyond_DM, 0))
        if beyond > 0:
            tl.atomic_add(saturated_ptr, beyond.to(tl.int64), sem="relaxed")
        k_DM = tl.clamp(k_DM, -most, most, propagate_nan=tl.PropagateNan.ALL)
        v_DM = tl.clamp(v_DM, -most, most, propagate_nan=tl.PropagateNan.ALL)
    k_DM, v_DM = levels(k_DM, KV), levels(v_DM, KV)
    tl.store(k_ptr.to(tl.pointer_type(tl.int8), bitcast=True) + place_DM, k_DM, mask=stored_DM)
    tl.store(v_ptr.to(tl.pointer_type(tl.int8), bitcast=True) + place_DM, v_DM, mask=stored_DM)
    k_DM, v_DM = value_of(k_DM, KV).to(tl.float32), value_of(v_DM, KV).to(tl.float32)
    if saturated_ptr is None:
        return k_DM * k_scale_M[None, :], v_DM * v_scale_M[None, :]
    else:
        return k_DM * k_scale_M, v_DM * v_scale_M


# A head is loaded as two pieces: its elements, and for each element the partner that is rotated into it. So no thread
# needs what another thread has loaded. Without a rotation the second piece is not used.


@triton.jit
def partners(d, ROTATED: tl.constexpr):
    """Return the indices of the elements that rotate into those at `d`."""
    half: tl.constexpr = ROTATED // 2
    return tl.where(d < half, d + half, tl.where(d < ROTATED, d - half, d))


@triton.jit
def load_angles(cos_sin_ptr, d, ROTATED: tl.constexpr):
    """Return the factors of the two pieces in the rotation: cosines, and sines with their signs."""
    if ROTATED > 0:
        half: tl.constexpr = ROTATED // 2
        angle = tl.where(d < half, d, d - half)
        cos = tl.load(cos_sin_ptr + angle, mask=d < ROTATED, other=1)
        sin = tl.load(cos_sin_ptr + half + angle, mask=d < ROTATED, other=0)
        return cos, tl.where(d < half, -sin, sin)
    else:
        return d, d


@triton.jit
def load_weights(weight_ptr, d, HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr, NORM: tl.constexpr):
    """Return the norm's weights for the two pieces of a head."""
    if NORM:
        weight = tl.load(weight_ptr + d, mask=d < HEAD_DIM, other=0)
        if ROTATED > 0:
            return weight, tl.load(weight_ptr + partners(d, ROTATED), mask=d < HEAD_DIM, other=0)
        else:
            return weight, weight
    else:
        return d, d


@triton.jit
def load_head(head_ptr, d, mask, ROTATED: tl.constexpr):
    """Return the two pieces of a head."""
    x = tl.load(head_ptr + d, mask=mask, other=0)
    if ROTATED > 0:
        return x, tl.load(head_ptr + partners(d, ROTATED), mask=mask, other=0)
    else:
        return x, x


@triton.jit
def inverse_rms(x_DM, eps, HEAD_DIM: tl.constexpr):
    """Return the factor, for each column, that an RMSNorm multiplies it by."""
    x32_DM = x_DM.to(tl.float32)
    return tl.rsqrt(tl.sum(x32_DM * x32_DM, 0) / HEAD_DIM + eps)[None, :]


@triton.jit
def rotated(
    x_DM, partner_DM, weights, angles, eps, HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Return heads normalised and rotated. They are rounded in between, as if by separate ops."""
    dtype: tl.constexpr = x_DM.dtype
    if NORM:
        scale_1M = inverse_rms(x_DM, eps, HEAD_DIM)
        x_DM = (x_DM.to(tl.float32) * scale_1M * weights[0].to(tl.float32)).to(dtype)
        partner_DM = (partner_DM.to(tl.float32) * scale_1M * weights[1].to(tl.float32)).to(dtype)
    if ROTATED > 0:
        x_DM = (x_DM.to(tl.float32) * angles[0] + partner_DM.to(tl.float32) * angles[1]).to(dtype)
    return x_DM
