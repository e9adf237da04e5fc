"""The kernels of sparse attention: keys of the indexer are stored, cached tokens are scored, the best are chosen, and
queries attend to these.

A program works for one token. Scores go through memory, for as many tokens at once as fit a fixed amount of it
(triton.py). The choice finds the lowest score that is taken, eight bits at a time by counting, and then writes places
in rising order; so it needs no sort, and its result does not depend on what runs beside a token.

Legend, beside that of op.py:
    E  heads of a program, padded
    M  query heads of a program, padded
    S  parts of the chosen tokens that programs share
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.attention.latent.triton_kernel import load_vectors
from ridgeline.kernels.attention.paged.triton_common import LOWEST
from ridgeline.kernels.base.triton_levels import columns_apart, levels, magnitude, multiplier, row_scale, scores_of

BINS = tl.constexpr(256)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "place_ptr"])
def index_keys_kernel(
    q_ptr,
    key_ptr,
    weight_ptr,
    bias_ptr,
    cos_sin_ptr,
    positions_ptr,
    cache_ptr,
    scale_ptr,
    place_ptr,
    out_ptr,
    eps,
    stride_q_token,
    stride_key,
    stride_block,
    stride_token,
    stride_scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KV: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store a token's key (group 0), or rotate E of its queries. D: DIM, padded. ROPE: the numbers that rotate. KV: the
    format of levels; None: keys are numbers."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    d_1D = tl.arange(0, D)[None, :]
    angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * ROPE
    if group == 0:
        inside_1D = d_1D < DIM
        x_1D = tl.load(key_ptr + token * stride_key + d_1D, mask=inside_1D, other=0)
        weight_1D = tl.load(weight_ptr + d_1D, mask=inside_1D, other=0).to(tl.float32)
        bias_1D = tl.load(bias_ptr + d_1D, mask=inside_1D, other=0).to(tl.float32)
        wide_1D = x_1D.to(tl.float32)
        centred_1D = tl.where(inside_1D, wide_1D - tl.sum(wide_1D, 1)[:, None] / DIM, 0)
        scale = tl.rsqrt(tl.sum(centred_1D * centred_1D, 1)[:, None] / DIM + eps)
        normed_1D = (centred_1D * scale * weight_1D + bias_1D).to(x_1D.dtype)  # as if the norm were a layer of its own
        place = tl.load(place_ptr + token).to(tl.int64)
        to_ptr = cache_ptr + place // BLOCK_SIZE * stride_block + place % BLOCK_SIZE * stride_token
        turned_1D, column_1D = _turned(normed_1D, d_1D, angle_ptr, ROPE, INTERLEAVED)
        if KV is None:
            tl.store(to_ptr + column_1D, turned_1D.to(cache_ptr.dtype.element_ty), mask=inside_1D)
        else:
            wide_1D = turned_1D.to(tl.float32)
            scale = row_scale(tl.max(magnitude(tl.where(inside_1D, wide_1D, 0)), 1), KV)
            tl.store(to_ptr + column_1D, levels(wide_1D / scale[:, None], KV), mask=inside_1D)
            at_1 = place // BLOCK_SIZE * stride_scale + place % BLOCK_SIZE + tl.arange(0, 1)
            tl.store(scale_ptr + at_1, scale.to(tl.bfloat16))
    else:
        head_E1 = (group - 1) * E + tl.arange(0, E)[:, None]
        real_ED = (head_E1 < HEADS) & (d_1D < DIM)
        x_ED = tl.load(q_ptr + token * stride_q_token + head_E1 * DIM + d_1D, mask=real_ED, other=0)
        turned_ED, column_1D = _turned(x_ED, d_1D, angle_ptr, ROPE, INTERLEAVED)
        tl.store(out_ptr + (token * HEADS + head_E1) * DIM + column_1D, turned_ED, mask=real_ED)


@triton.jit
def _turned(x, d_1D, angle_ptr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return (vectors whose first ROPE numbers are rotated, in their dtype; the columns that these belong in)."""
    rotates_1D = d_1D < ROPE
    if INTERLEAVED:
        other_1D, pair_1D, first_1D = d_1D ^ 1, d_1D // 2, d_1D % 2 == 0
        column_1D = tl.where(rotates_1D, pair_1D + tl.where(first_1D, 0, ROPE // 2), d_1D)
    else:
        first_1D = d_1D < ROPE // 2
        pair_1D = tl.where(first_1D, d_1D, d_1D - ROPE // 2)
        other_1D, column_1D = tl.where(first_1D, d_1D + ROPE // 2, d_1D - ROPE // 2), d_1D
    other_1D = tl.where(rotates_1D, other_1D, d_1D)
    cos_1D = tl.load(angle_ptr + pair_1D, mask=rotates_1D, other=1.0)
    sin_1D = tl.load(angle_ptr + ROPE // 2 + pair_1D, mask=rotates_1D, other=0.0)
    wide = x.to(tl.float32)
    beside = tl.gather(wide, tl.broadcast_to(other_1D, x.shape), 1)
    turned = wide * cos_1D + tl.where(first_1D, -beside, beside) * sin_1D
    return turned.to(x.dtype), column_1D


@triton.jit
def index_scores_kernel(
    q_ptr,
    weights_ptr,
    cache_ptr,
    scale_ptr,
    table_ptr,
    slot_ptr,
    seen_ptr,
    bits_ptr,
    base_ptr,
    scores_ptr,
    first_token,
    count,
    stride_block,
    stride_token,
    stride_scale,
    stride_table,
    stride_scores,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    TREE: tl.constexpr,
    KV: tl.constexpr,
    PDL: tl.constexpr,
):
    """Score a token's cached tokens, every num_programs(1)-th tile of them: sum over heads of weight · relu(q · key).

    slot, seen: int32 [T], the slots of tokens, and how many cached tokens each can see. A token that sees no more than
    `count` needs no scores. TREE: of these it sees those in bits and base, int64 [T]; the others' scores are -inf. KV:
    the format of levels, of which two are a word of the cache; DIM and D count numbers, and strides words.
    """
    token = first_token + tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    seen = tl.load(seen_ptr + token)
    if seen <= count:
        return
    EACH: tl.constexpr = 1 if KV is None else 2
    e_E, d_D, w_W, j_J = tl.arange(0, E), tl.arange(0, D), tl.arange(0, D // EACH), tl.arange(0, TILE)
    real_E = e_E < HEADS
    at_ED = (token.to(tl.int64) * HEADS + e_E)[:, None] * DIM + d_D[None, :]
    q_ED = tl.load(q_ptr + at_ED, mask=real_E[:, None] & (d_D < DIM)[None, :], other=0)
    q = columns_apart(multiplier(q_ED, KV), E, D, KV)
    weights_E = tl.load(weights_ptr + token.to(tl.int64) * HEADS + e_E, mask=real_E, other=0)
    table_ptr += tl.load(slot_ptr + token).to(tl.int64) * stride_table
    scores_ptr += tl.program_id(0).to(tl.int64) * stride_scores
    if TREE:
        bits, base = tl.load(bits_ptr + token), tl.load(base_ptr + token).to(tl.int32)
    for start in range(tl.program_id(1) * TILE, seen, tl.num_programs(1) * TILE):
        place_J = start + j_J
        inside_J = place_J < seen
        if TREE:
            inside_J = inside_J & _in_tree(place_J, bits, base)
        block_J = tl.load(table_ptr + place_J // BLOCK_SIZE, mask=inside_J, other=0).to(tl.int64)
        from_J = block_J * stride_block + place_J % BLOCK_SIZE * stride_token
        real_JW = inside_J[:, None] & (w_W < DIM // EACH)[None, :]
        key_JW = tl.load(cache_ptr + from_J[:, None] + w_W[None, :], mask=real_JW, other=0)
        scale_J = 1.0
        if KV is not None:
            scale_J = tl.load(scale_ptr + block_J * stride_scale + place_J % BLOCK_SIZE, mask=inside_J, other=0)
            scale_J = scale_J.to(tl.float32)
        dots_EJ = tl.maximum(scores_of(q, key_JW, tl.full((TILE,), 1, tl.float32), KV, PDL), 0)
        score_J = tl.sum(dots_EJ * weights_E[:, None], 0) * scale_J
        score_J = tl.where(score_J == 0, 0.0, score_J)  # -0 and 0 are one score
        tl.store(scores_ptr + place_J, tl.where(inside_J, score_J, -float("inf")), mask=place_J < seen)


@triton.jit
def _in_tree(place_J, bits, base):
    node_J = place_J - base
    own_J = tl.minimum(tl.maximum(node_J, 0), 63).to(tl.int64)
    return (node_J < 0) | ((node_J < 64) & (((bits >> own_J) & 1) != 0))


@triton.jit
def index_choice_kernel(
    scores_ptr,
    seen_ptr,
    bits_ptr,
    base_ptr,
    chosen_ptr,
    first_token,
    stride_scores,
    COUNT: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    TREE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the places of a token's COUNT highest scores in rising order, then -1. K: COUNT, padded."""
    token = first_token + tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    seen = tl.load(seen_ptr + token)
    j_J, bin_B, k_K = tl.arange(0, TILE), tl.arange(0, BINS), tl.arange(0, K)
    scores_ptr += tl.program_id(0).to(tl.int64) * stride_scores
    chosen_ptr += token.to(tl.int64) * COUNT
    all_seen = seen <= COUNT
    if TREE:
        bits, base = tl.load(bits_ptr + token), tl.load(base_ptr + token).to(tl.int32)
    least, fixed, missing = tl.full((), 0, tl.uint32), tl.full((), 0, tl.uint32), COUNT
    if not all_seen:
        for shift in tl.static_range(24, -1, -8):
            found_B = tl.zeros((BINS,), tl.int32)
            for start in range(0, seen, TILE):
                inside_J = start + j_J < seen
                bits_J = _ordered(tl.load(scores_ptr + start + j_J, mask=inside_J, other=0))
                same_J = inside_J & ((bits_J & fixed) == least)
                bin_J = ((bits_J >> shift) & 255).to(tl.int32)
                found_B += tl.histogram(bin_J, BINS, mask=same_J)
            from_B = tl.cumsum(found_B, reverse=True)  # so many scores lie in the bin or above it
            bin = tl.sum((from_B >= missing).to(tl.int32), 0) - 1
            missing -= tl.sum(tl.where(bin_B > bin, found_B, 0), 0)
            least = least | (bin.to(tl.uint32) << shift)
            fixed = fixed | tl.full((), 255 << shift, tl.uint32)
    written, equal = 0, 0
    for start in range(0, seen, TILE):
        place_J = start + j_J
        inside_J = place_J < seen
        if all_seen:
            take_J = inside_J & _in_tree(place_J, bits, base) if TREE else inside_J
        else:
            score_J = tl.load(scores_ptr + place_J, mask=inside_J, other=-float("inf"))
            bits_J = _ordered(score_J)
            same_J = inside_J & (bits_J == least)
            rank_J = equal + tl.cumsum(same_J.to(tl.int32))
            equal += tl.sum(same_J.to(tl.int32), 0)
            take_J = inside_J & ((bits_J > least) | (same_J & (rank_J <= missing))) & (score_J > -float("inf"))
        column_J = written + tl.cumsum(take_J.to(tl.int32)) - 1
        tl.store(chosen_ptr + column_J, place_J, mask=take_J)
        written += tl.sum(take_J.to(tl.int32), 0)
    tl.store(chosen_ptr + k_K, tl.full((K,), -1, tl.int32), mask=(k_K >= written) & (k_K < COUNT))


@triton.jit
def choice_bits_kernel(chosen_ptr, words_ptr, stride_words, COUNT: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr):
    """Set the bits of a token's chosen places; all are 0 before."""
    token, k_K = tl.program_id(0).to(tl.int64), tl.arange(0, K)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    place_K = tl.load(chosen_ptr + token * COUNT + k_K, mask=k_K < COUNT, other=-1)
    bit_K = tl.full((K,), 1, tl.int64) << (place_K % 64).to(tl.int64)
    tl.atomic_or(words_ptr + token * stride_words + place_K // 64, bit_K, mask=place_K >= 0, sem="relaxed")


@triton.jit
def _ordered(score):
    """Return numbers in the order of float32 scores: uint32."""
    bits = score.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)


@triton.jit
def sparse_attention_kernel(
    q_ptr,
    rotated_ptr,
    cache_ptr,
    out_ptr,
    table_ptr,
    slot_ptr,
    chosen_ptr,
    parts_ptr,
    part_lse_ptr,
    scale,
    stride_q_token,
    stride_q_head,
    stride_rotated_token,
    stride_rotated_head,
    stride_block,
    stride_table,
    stride_token: tl.constexpr,
    HEADS: tl.constexpr,
    COUNT: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    L: tl.constexpr,
    Y: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend with QUERIES heads of a token to one of PARTS parts of its chosen tokens.

    parts [T, PARTS, HEADS, RANK], part_lse [T, PARTS, HEADS]: float32, the results of several parts.
    scale: log2(e) times the op's. RANK, ROPE: L and Y without padding.
    """
    token, first_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1) * QUERIES, tl.program_id(2)
    m_M, l_L, y_Y, j_J = tl.arange(0, QUERIES), tl.arange(0, L), tl.arange(0, Y), tl.arange(0, TILE)
    head_M = first_head + m_M
    real_M1 = (head_M < HEADS)[:, None]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    q_M1 = (token * stride_q_token + head_M.to(tl.int64) * stride_q_head)[:, None]
    rotated_M1 = (token * stride_rotated_token + head_M.to(tl.int64) * stride_rotated_head)[:, None]
    q = load_vectors(q_ptr + q_M1 + l_L[None, :], real_M1, l_L[None, :], RANK, L)
    rotated = load_vectors(rotated_ptr + rotated_M1 + y_Y[None, :], real_M1, y_Y[None, :], ROPE, Y)
    acc = tl.zeros((QUERIES, L), tl.float32)
    max_M = tl.full((QUERIES,), LOWEST, tl.float32)
    sum_M = tl.zeros((QUERIES,), tl.float32)
    table_ptr += tl.load(slot_ptr + token).to(tl.int64) * stride_table
    chosen_ptr += token * COUNT
    EACH: tl.constexpr = (COUNT + PARTS * TILE - 1) // (PARTS * TILE) * TILE
    begin, end = part * EACH, tl.minimum(part * EACH + EACH, COUNT)
    for start in range(begin, end, TILE):
        if tl.load(chosen_ptr + start) >= 0:  # places come first, and -1 behind them
            place_J = tl.load(chosen_ptr + start + j_J, mask=start + j_J < end, other=-1)
            real_J = place_J >= 0
            block_J = tl.load(table_ptr + place_J // BLOCK_SIZE, mask=real_J, other=0).to(tl.int64)
            from_J1 = (block_J * stride_block + place_J % BLOCK_SIZE * stride_token)[:, None]
            # Other cells become 0: 0 · NaN is NaN
            c_JL = load_vectors(cache_ptr + from_J1 + l_L[None, :], real_J[:, None], l_L[None, :], RANK, L)
            r_JY = load_vectors(cache_ptr + from_J1 + RANK + y_Y[None, :], real_J[:, None], y_Y[None, :], ROPE, Y)
            x = tl.dot(q, tl.trans(c_JL), input_precision="ieee")
            x = tl.dot(rotated, tl.trans(r_JY), x, input_precision="ieee") * scale
            x = tl.where(real_J[None, :], x, -float("inf"))
            new_max_M = tl.maximum(max_M, tl.max(x, 1))
            p = tl.exp2(x - new_max_M[:, None])
            shrink_M = tl.exp2(max_M - new_max_M)
            sum_M = sum_M * shrink_M + tl.sum(p, 1)
            acc = tl.dot(p.to(c_JL.dtype), c_JL, acc * shrink_M[:, None], input_precision="ieee")
            max_M = new_max_M
    acc = acc * tl.where(sum_M > 0, 1 / sum_M, 0)[:, None]
    stored = real_M1 & (l_L < RANK)[None, :]
    if PARTS == 1:
        out_M = (token * HEADS + head_M) * RANK
        tl.store(out_ptr + out_M[:, None] + l_L[None, :], acc.to(out_ptr.dtype.element_ty), mask=stored)
    else:
        part_M = (token * PARTS + part) * HEADS + head_M
        tl.store(parts_ptr + part_M[:, None] * RANK + l_L[None, :], acc, mask=stored)
        lse_M = tl.where(sum_M > 0, max_M + tl.log2(sum_M), LOWEST)
        tl.store(part_lse_ptr + part_M, lse_M, mask=head_M < HEADS)


@triton.jit
def sparse_combine_kernel(
    out_ptr,
    parts_ptr,
    part_lse_ptr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    L: tl.constexpr,
    S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add up the parts of one head of a token. S: PARTS, padded."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    s_S, l_L = tl.arange(0, S), tl.arange(0, L)
    part_S = (token * PARTS + s_S) * HEADS + head
    lse_S = tl.load(part_lse_ptr + part_S, mask=s_S < PARTS, other=LOWEST)
    weight_S = tl.where(lse_S > LOWEST, tl.exp2(lse_S - tl.max(lse_S, 0)), 0)
    inside_SL = (s_S < PARTS)[:, None] & (l_L < RANK)[None, :]
    parts_SL = tl.load(parts_ptr + part_S[:, None] * RANK + l_L[None, :], mask=inside_SL, other=0)
    total = tl.sum(weight_S, 0)
    out_L = tl.sum(parts_SL * weight_S[:, None], 0) * tl.where(total > 0, 1 / total, 0)
    tl.store(out_ptr + (token * HEADS + head) * RANK + l_L, out_L.to(out_ptr.dtype.element_ty), mask=l_L < RANK)
