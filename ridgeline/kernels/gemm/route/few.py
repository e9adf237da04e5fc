"""Routing of some dozens of tokens in one launch.

A program keeps some experts' rows in registers, asked for before the kernel before it has ended, and multiplies them
with some tokens. It normalises these itself: that costs less than another launch. The last program to arrive at a group
of tokens has all their scores and chooses for them, a token a warp.

A few tokens are one group, and the place of a pair is the number of pairs before it, found by comparing all pairs with
all. More tokens make several groups. Each expert has words with one bit for each token. Every group sets the bits of
its tokens, and the last group finds the places by counting bits. The result does not depend on the order in which bits
are set.

Legend:
    T  tokens of a program or of a group
    R  experts' rows of a program
    B  inputs, padded to a power of two
    E  experts, padded to a power of two
    K  experts of a token, padded to a power of two
    P  pairs of all tokens, with that K
    W  words of an expert: one for 64 tokens
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.gemm.route.choice import (
    aot_rules,
    bit_of,
    bits_set,
    choose_experts,
    load_now,
    store_choice,
    tokens_alive,
)
from ridgeline.kernels.gemm.route.choose import Few, choose

NO_PAIR = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _place_by_rank(
    expert_TK, token_T1, kept_T1, alive_T1, tally_E, tally_ptr, token_ptr, place_ptr, start_ptr,
    PAIRS: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr,
    TALLY: tl.constexpr,
):  # fmt: skip
    """Put the pairs of all tokens in order: by expert, then by token. Pairs that go nowhere have the expert E."""
    choice_1K = tl.arange(0, CHOICES)[None, :]
    key_TK = tl.where(alive_T1, expert_TK, E) * PAIRS + token_T1 * CHOICES + choice_1K
    key_P = tl.reshape(tl.where(kept_T1 & (choice_1K < K), key_TK, NO_PAIR), (PAIRS,))
    column_E = tl.arange(0, EXPERTS)
    end_E = tl.sum((key_P[:, None] < (column_E * PAIRS + PAIRS)[None, :]).to(tl.int32), 0)
    tl.store(start_ptr, 0)
    tl.store(start_ptr + 1 + column_E, end_E, mask=column_E < E)
    place_P = tl.sum((key_P[:, None] < key_P[None, :]).to(tl.int32), 0)
    pair_P = key_P % PAIRS
    token_P = pair_P // CHOICES
    tl.store(place_ptr + token_P * K + pair_P % CHOICES, place_P, mask=key_P != NO_PAIR)
    tl.store(token_ptr + place_P, token_P, mask=key_P != NO_PAIR)
    if TALLY:
        count_E = tl.sum(((key_P // PAIRS)[:, None] == column_E[None, :]).to(tl.int32), 0)
        tl.store(tally_ptr + column_E, tally_E + count_E, mask=column_E < E)


@triton.jit
def _place_by_bits(
    bits_ptr, expert_ptr, tally_ptr, token_ptr, place_ptr, start_ptr, tokens,
    WORDS: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr,
    PAIRS: tl.constexpr, LIVE: tl.constexpr, TALLY: tl.constexpr,
):  # fmt: skip
    """Put the pairs of all tokens in order, as other programs have chosen them, and clear the bits."""
    column_E = tl.arange(0, EXPERTS)
    pair_P = tl.arange(0, PAIRS)
    token_P = pair_P // CHOICES
    kept_P = (token_P < tokens) & (pair_P % CHOICES < K)
    pair_P = token_P * K + pair_P % CHOICES
    expert_P = tl.load(expert_ptr + pair_P, mask=kept_P, other=E, cache_modifier=".cg")
    if TALLY:
        tally_E = load_now(tally_ptr + column_E, column_E < E)
    count_E = tl.zeros((EXPERTS,), tl.int32)
    for word in tl.static_range(WORDS):
        count_E += bits_set(tl.load(bits_ptr + word * EXPERTS + column_E, cache_modifier=".cg"))
    goes_P = expert_P < E
    place_P = tl.zeros((PAIRS,), tl.int32)
    for word in tl.static_range(WORDS):
        bits_P = tl.load(bits_ptr + word * EXPERTS + expert_P, mask=goes_P, other=0, cache_modifier=".cg")
        if word * 64 + 64 < PAIRS // CHOICES:  # otherwise no token lies behind this word
            before_P = tl.where(token_P >= word * 64 + 64, -1, bit_of(token_P % 64) - 1)
        else:
            before_P = bit_of(token_P % 64) - 1
        place_P += tl.where(token_P >= word * 64, bits_set(bits_P & before_P), 0)
    end_E = tl.cumsum(count_E, 0)
    place_P += tl.gather(end_E - count_E, tl.minimum(expert_P, E - 1), 0)
    if LIVE:  # the pairs of all others lie behind, in their own order
        idle_P = (kept_P & (expert_P == E)).to(tl.int32)
        place_P = tl.where(goes_P, place_P, tokens * K - tl.cumsum(idle_P, 0, reverse=True))
    tl.store(place_ptr + pair_P, place_P, mask=kept_P)
    tl.store(token_ptr + place_P, token_P, mask=kept_P)
    tl.store(start_ptr, 0)
    tl.store(start_ptr + 1 + column_E, end_E, mask=column_E < E)
    if TALLY:
        tl.store(tally_ptr + column_E, tally_E + count_E, mask=column_E < E)
    tl.debug_barrier()  # until every thread has read the bits that others clear
    for word in tl.static_range(WORDS):
        tl.store(bits_ptr + word * EXPERTS + column_E, tl.zeros((EXPERTS,), tl.int64))


@triton.jit
def _product(w_1RB, n_T1B, SLICES: tl.constexpr, DOT: tl.constexpr):
    """Return the products [T, R]. On the matrix units a warp takes a slice of the inputs, then slices are added up."""
    if SLICES == 0:
        return tl.sum(w_1RB.to(tl.float32) * n_T1B.to(tl.float32), 2)
    else:
        TOKENS: tl.constexpr = n_T1B.shape[0]
        ROWS: tl.constexpr = w_1RB.shape[1]
        PART: tl.constexpr = w_1RB.shape[2] // SLICES
        w_SRP = tl.permute(tl.reshape(w_1RB.to(DOT), (ROWS, SLICES, PART)), (1, 0, 2))
        n_SPT = tl.permute(tl.reshape(n_T1B.to(DOT), (TOKENS, SLICES, PART)), (1, 2, 0))
        return tl.trans(tl.sum(tl.dot(w_SRP, n_SPT, input_precision="ieee"), 0))


@triton.jit(do_not_specialize=["tokens", "eps", "scale"])
def few_kernel(
    x_ptr, residual_ptr, norm_ptr, router_ptr, bias_ptr, correction_ptr, expert_scale_ptr, live_ptr, tally_ptr,
    n_ptr, s_ptr, expert_ptr, weight_ptr, token_ptr, place_ptr, start_ptr, logits_ptr, bits_ptr, arrival_ptr,
    x_stride, residual_stride, tokens, eps, scale,
    M: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EACH: tl.constexpr, TOKENS: tl.constexpr,
    GROUP: tl.constexpr, SLICES: tl.constexpr, DOT: tl.constexpr, NORM: tl.constexpr,
    RESIDUAL: tl.constexpr, LIVE: tl.constexpr, TALLY: tl.constexpr,
    E: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr, SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, PAIR: tl.constexpr,
    GROUPS_PADDED: tl.constexpr, BIAS: tl.constexpr, CORRECTION: tl.constexpr, EXPERT_SCALE: tl.constexpr,
    NEARNESS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute `route`. Program (i, j) multiplies experts from i * ROWS on with tokens from j * EACH on.

    TOKENS: a power of two that covers all tokens.
    GROUP: rows of the tile in which a program chooses. Either it covers all tokens, or it covers EACH.
    SLICES: of the inputs, each for a warp on the matrix units, which multiply numbers of type DOT. 0: vector units.
    logits: float32 [tokens, EXPERTS].
    bits: int64 [words, EXPERTS], 0 between launches.
    arrival: counters of programs, then of programs of each group. They are 0 between launches.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row_1R1 = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :, None]
    input_11B = tl.arange(0, BLOCK)[None, None, :]
    kept_11B = input_11B < M
    w_1RB = tl.load(router_ptr + tl.minimum(row_1R1, E - 1) * M + input_11B, mask=kept_11B, other=0.0)
    if NORM:
        norm_11B = tl.load(norm_ptr + input_11B, mask=kept_11B, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()

    begin = tl.program_id(1) * EACH
    token_T11 = begin + tl.arange(0, EACH)[:, None, None]
    from_T11 = tl.minimum(token_T11, tokens - 1)
    s_T1B = tl.load(x_ptr + from_T11 * x_stride + input_11B, mask=kept_11B, other=0.0)
    if RESIDUAL:
        r_T1B = tl.load(residual_ptr + from_T11 * residual_stride + input_11B, mask=kept_11B, other=0.0)
        s_T1B = (s_T1B.to(tl.float32) + r_T1B.to(tl.float32)).to(s_T1B.dtype)
    n_T1B = s_T1B
    if NORM:
        a_T1B = s_T1B.to(tl.float32)
        factor_T11 = tl.rsqrt(tl.sum(a_T1B * a_T1B, 2) / M + eps)[:, :, None]
        n_T1B = (a_T1B * factor_T11 * norm_11B.to(tl.float32)).to(s_T1B.dtype)
    logit_TR = _product(w_1RB, n_T1B, SLICES, DOT)
    token_T1 = begin + tl.arange(0, EACH)[:, None]
    row_1R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(logits_ptr + token_T1 * EXPERTS + row_1R, logit_TR, mask=(token_T1 < tokens) & (row_1R < E))

    SINGLE: tl.constexpr = GROUP >= TOKENS
    if SINGLE:
        first, end, needed = 0, tokens, tl.num_programs(0) * tl.num_programs(1)
        counter_ptr = arrival_ptr
    else:
        first, end, needed = begin, tl.minimum(begin + EACH, tokens), tl.num_programs(0)
        counter_ptr = arrival_ptr + 1 + tl.program_id(1)
    tl.debug_barrier()  # until every thread's scores are written, before any thread of this program says so
    arrived = tl.atomic_add(counter_ptr, 1) + 1
    # Only now, so that no program waits for these
    if tl.program_id(0) < EACH:
        mine_T11 = (token_T11 - begin) % tl.num_programs(0) == tl.program_id(0)
        written_T1B = mine_T11 & (token_T11 < tokens) & kept_11B
        if RESIDUAL:
            tl.store(s_ptr + token_T11 * M + input_11B, s_T1B, mask=written_T1B)
        if NORM:
            tl.store(n_ptr + token_T11 * M + input_11B, n_T1B, mask=written_T1B)
    if arrived == needed:
        tl.store(counter_ptr, 0)
        token_G = first + tl.arange(0, GROUP)
        token_G1 = token_G[:, None]
        kept_G1 = token_G1 < end
        column_1E = tl.arange(0, EXPERTS)[None, :]
        logits_GE = tl.load(
            logits_ptr + token_G1 * EXPERTS + column_1E, mask=kept_G1 & (column_1E < E), other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        tally_E = tl.zeros((EXPERTS,), tl.int64)
        if SINGLE and TALLY:
            column_E = tl.arange(0, EXPERTS)
            tally_E = load_now(tally_ptr + column_E, column_E < E)
        alive_G1 = tokens_alive(live_ptr, token_G, end, LIVE)[:, None]
        expert_GK, weight_GK, _ = choose_experts(
            logits_GE, bias_ptr, correction_ptr, expert_scale_ptr, scale, E, EXPERTS, K, CHOICES, SIGMOID, RENORMALIZE,
            GROUPS, TOP_GROUPS, PAIR, GROUPS_PADDED, BIAS, CORRECTION, EXPERT_SCALE, NEARNESS,
        )  # fmt: skip
        store_choice(expert_ptr, weight_ptr, expert_GK, weight_GK, token_G1, kept_G1, alive_G1, E, K, CHOICES)
        if SINGLE:
            _place_by_rank(
                expert_GK, token_G1, kept_G1, alive_G1, tally_E, tally_ptr, token_ptr, place_ptr, start_ptr,
                GROUP * CHOICES, E, EXPERTS, K, CHOICES, TALLY,
            )  # fmt: skip
        else:
            chosen_GK = alive_G1 & (tl.arange(0, CHOICES)[None, :] < K)
            word_GK = token_G1 // 64 * EXPERTS + expert_GK
            tl.atomic_or(bits_ptr + word_GK, bit_of(token_G1 % 64), mask=chosen_GK, sem="relaxed")
            tl.debug_barrier()  # until every thread's bits are set
            if tl.atomic_add(arrival_ptr, 1) == tl.num_programs(1) - 1:
                tl.store(arrival_ptr, 0)
                _place_by_bits(
                    bits_ptr, expert_ptr, tally_ptr, token_ptr, place_ptr, start_ptr, tokens, (TOKENS + 63) // 64, E,
                    EXPERTS, K, CHOICES, TOKENS * CHOICES, LIVE, TALLY,
                )  # fmt: skip


def _aot(tokens: int, width: int, experts: int, used: int, *archs: str, grouped: bool = False) -> AotKernel:
    plan = choose(tokens, width, experts)
    assert isinstance(plan, Few)
    pointers = ("x", "residual", "norm", "router", "bias", "expert_scale", "n", "s")
    signature = {f"{name}_ptr": "*bf16" for name in pointers}
    signature |= {f"{name}_ptr": "*i32" for name in ("expert", "token", "place", "start", "arrival")}
    signature |= {f"{name}_ptr": "*fp32" for name in ("correction", "weight", "logits")}
    signature |= {"live_ptr": "*i1", "tally_ptr": "*i64", "bits_ptr": "*i64"}
    signature |= {"x_stride": "i32:16", "residual_stride": "i32:16"}
    signature |= {"tokens": "i32", "eps": "fp32", "scale": "fp32"}
    constants = {"M": width, "BLOCK": plan.block, "ROWS": plan.rows, "EACH": plan.each, "TOKENS": plan.tokens}
    constants |= {"SLICES": plan.slices, "DOT": tl.bfloat16}
    constants |= dict.fromkeys(("NORM", "RESIDUAL", "LIVE", "TALLY"), True) | {"GROUP": plan.group}
    constants |= aot_rules(experts, plan.experts, used, grouped=grouped)
    return AotKernel(few_kernel, signature, constants, num_warps=plan.warps, hot=True, archs=archs)


AOT = (
    _aot(1, 2048, 128, 8, *ONE_OF_EACH),
    _aot(64, 2048, 128, 8, "sm_90"),
    _aot(1, 7168, 256, 8, "sm_90", grouped=True),
)
