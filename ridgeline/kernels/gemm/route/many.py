"""Routing of many normalised tokens: scores and choices in one launch, the order of the pairs in the next.

In the first launch a program multiplies a tile of tokens with the whole router on the matrix units, chooses, and counts
its tokens of each expert: an expert has a word with a bit for each token. In the second launch every program adds up
the counts of all tiles before its own, while it loads the pairs of its own tile. So the order of the pairs is that of
the tokens, whichever program runs first.

Legend:
    T  tokens of a tile
    E  experts, padded to a power of two
    B  inputs of a block
    C  tiles whose counts are added up at once
    K  experts of a token, padded to a power of two
    P  pairs of a tile, with that K
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
from ridgeline.kernels.gemm.route.choose import Many, choose


@triton.jit(do_not_specialize=["tokens", "scale"])
def scored_kernel(
    n_ptr, router_ptr, bias_ptr, correction_ptr, expert_scale_ptr, live_ptr,
    expert_ptr, weight_ptr, place_ptr, count_ptr, logits_ptr, n_stride, tokens, scale,
    M: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, DOT: tl.constexpr, LIVE: tl.constexpr,
    SPREAD: tl.constexpr,  # the matrix unit leaves a token's scores in several warps
    E: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr, SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, PAIR: tl.constexpr,
    GROUPS_PADDED: tl.constexpr, BIAS: tl.constexpr, CORRECTION: tl.constexpr, EXPERT_SCALE: tl.constexpr,
    NEARNESS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write each token's experts and weights, how many pairs of its expert are before each pair in its tile, and the
    tiles' counts.

    count: int32 [tiles, EXPERTS], then [tiles] pairs that go nowhere. Those count among themselves.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    token_T1 = token_T[:, None]
    column_E = tl.arange(0, EXPERTS)
    input_B = tl.arange(0, BLOCK)
    n_TB = n_ptr + tl.minimum(token_T1, tokens - 1).to(tl.int64) * n_stride + input_B[None, :]
    w_BE = router_ptr + tl.minimum(column_E, E - 1)[None, :] * M + input_B[:, None]
    logits_TE = tl.zeros((TOKENS, EXPERTS), tl.float32)
    for start in range(0, M, BLOCK):
        if M % BLOCK == 0:
            a_TB, b_BE = tl.load(n_TB + start), tl.load(w_BE + start)
        else:
            inside_B = start + input_B < M
            a_TB = tl.load(n_TB + start, mask=inside_B[None, :], other=0.0)
            b_BE = tl.load(w_BE + start, mask=inside_B[:, None], other=0.0)
        logits_TE = tl.dot(a_TB.to(DOT), b_BE.to(DOT), logits_TE, input_precision="ieee")

    if SPREAD:  # a load gives a warp whole rows, so that warps need not wait for each other with every choice
        logits_TE = _reloaded(logits_TE, logits_ptr + tl.program_id(0) * (TOKENS * EXPERTS), TOKENS, EXPERTS)
    expert_TK, weight_TK, chosen_TE = choose_experts(
        logits_TE, bias_ptr, correction_ptr, expert_scale_ptr, scale, E, EXPERTS, K, CHOICES, SIGMOID, RENORMALIZE,
        GROUPS, TOP_GROUPS, PAIR, GROUPS_PADDED, BIAS, CORRECTION, EXPERT_SCALE, NEARNESS,
    )  # fmt: skip
    alive_T = tokens_alive(live_ptr, token_T, tokens, LIVE)
    alive_T1 = alive_T[:, None]
    store_choice(expert_ptr, weight_ptr, expert_TK, weight_TK, token_T1, token_T1 < tokens, alive_T1, E, K, CHOICES)

    local_T = tl.arange(0, TOKENS)
    bit_T = bit_of(local_T)
    bits_E = tl.sum(tl.where(chosen_TE & alive_T1, bit_T[:, None], 0), 0)
    idle_T = (token_T < tokens) & (alive_T == 0)
    local_P = tl.arange(0, TOKENS * CHOICES)
    choice_P = local_P % CHOICES
    earlier_P = bit_of(local_P // CHOICES) - 1
    expert_P = tl.reshape(tl.where(alive_T1, expert_TK, E), (TOKENS * CHOICES,))
    before_P = bits_set(tl.gather(bits_E, tl.minimum(expert_P, E - 1), 0) & earlier_P)
    if LIVE:
        behind_P = bits_set(tl.sum(tl.where(idle_T, bit_T, 0), 0) & earlier_P) * K + choice_P
        before_P = tl.where(expert_P < E, before_P, behind_P)
    pair_P = tl.program_id(0) * TOKENS * K + local_P // CHOICES * K + choice_P
    tl.store(place_ptr + pair_P, before_P, mask=(choice_P < K) & (pair_P < tokens * K))
    tl.store(count_ptr + tl.program_id(0) * EXPERTS + column_E, bits_set(bits_E))
    tl.store(count_ptr + tl.num_programs(0) * EXPERTS + tl.program_id(0), tl.sum(idle_T.to(tl.int32), 0) * K)


@triton.jit
def _reloaded(tile, pointer, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return a tile of a program in the layout of a load from memory, through memory of its own."""
    at = pointer + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(at, tile)
    tl.debug_barrier()
    return tl.load(at)


@triton.jit(do_not_specialize=["tokens", "tiles", "each"])
def order_kernel(
    expert_ptr, count_ptr, tally_ptr, token_ptr, place_ptr, start_ptr, tokens, tiles, each,
    TOKENS: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr,
    CHUNK: tl.constexpr, TALLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Turn the places within tiles into places of the whole step, and write the rest of the routes. A program handles
    `each` tiles."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(0) * each
    local_P = tl.arange(0, TOKENS * CHOICES)
    expert_P, place_P = _pairs(expert_ptr, place_ptr, local_P, first, tokens, TOKENS, E, K, CHOICES)
    column_E = tl.arange(0, EXPERTS)
    if TALLY:  # for the first program
        tally_E = load_now(tally_ptr + column_E, column_E < E)
    count_E = tl.zeros((EXPERTS,), tl.int32)
    before_E = tl.zeros((EXPERTS,), tl.int32)
    idle = 0
    for start in range(0, tiles, CHUNK):
        tile_C = start + tl.arange(0, CHUNK)
        tile_C1 = tile_C[:, None]
        count_CE = tl.load(count_ptr + tile_C1 * EXPERTS + column_E[None, :], mask=tile_C1 < tiles, other=0)
        idle_C = tl.load(count_ptr + tiles * EXPERTS + tile_C, mask=tile_C < tl.minimum(first, tiles), other=0)
        count_E += tl.sum(count_CE, 0)
        before_E += tl.sum(tl.where(tile_C1 < first, count_CE, 0), 0)
        idle += tl.sum(idle_C, 0)
    end_E = tl.cumsum(count_E, 0)
    idle += tl.sum(count_E, 0)  # the place of this program's first pair that goes nowhere
    base_E = end_E - count_E + before_E
    if tl.program_id(0) == 0:
        tl.store(start_ptr, 0)
        tl.store(start_ptr + 1 + column_E, end_E, mask=column_E < E)
        if TALLY:
            tl.store(tally_ptr + column_E, tally_E + count_E, mask=column_E < E)
    for tile in range(first, tl.minimum(first + each, tiles)):
        base_P = tl.gather(base_E, tl.minimum(expert_P, E - 1), 0)
        place_P += tl.where(expert_P < E, base_P, idle)
        token_P = tile * TOKENS + local_P // CHOICES
        kept_P = (token_P < tokens) & (local_P % CHOICES < K)
        tl.store(place_ptr + token_P * K + local_P % CHOICES, place_P, mask=kept_P)
        tl.store(token_ptr + place_P, token_P, mask=kept_P)
        if tile + 1 < first + each:
            base_E += tl.load(count_ptr + tile * EXPERTS + column_E)
            idle += tl.load(count_ptr + tiles * EXPERTS + tile)
            expert_P, place_P = _pairs(expert_ptr, place_ptr, local_P, tile + 1, tokens, TOKENS, E, K, CHOICES)


@triton.jit
def _pairs(
    expert_ptr, place_ptr, local_P, tile, tokens,
    TOKENS: tl.constexpr, E: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """Return the experts of a tile's pairs and their places in the tile. Where there is no pair they are E and 0."""
    token_P = tile * TOKENS + local_P // CHOICES
    exists_P = (token_P < tokens) & (local_P % CHOICES < K)
    pair_P = token_P * K + local_P % CHOICES
    expert_P = tl.load(expert_ptr + pair_P, mask=exists_P, other=E)
    return expert_P, tl.load(place_ptr + pair_P, mask=exists_P, other=0)


def _aot_scored(
    tokens: int, width: int, experts: int, used: int, unit: str, *archs: str, grouped: bool = False
) -> AotKernel:
    plan = choose(tokens, width, experts)
    assert isinstance(plan, Many)
    signature = {f"{name}_ptr": "*bf16" for name in ("n", "router", "bias", "expert_scale")}
    signature |= {"correction_ptr": "*fp32", "weight_ptr": "*fp32", "live_ptr": "*i1"}
    signature |= {f"{name}_ptr": "*i32" for name in ("expert", "place", "count")}
    signature |= {"logits_ptr": "*fp32"}
    signature |= {"n_stride": "i32:16", "tokens": "i32", "scale": "fp32"}
    constants = {"M": width, "BLOCK": plan.block, "TOKENS": plan.tokens, "DOT": tl.bfloat16, "LIVE": True}
    constants |= {"SPREAD": plan.spread}
    constants |= aot_rules(experts, plan.experts, used, grouped=grouped)
    shape = {"num_warps": plan.warps, "num_stages": plan.stages}
    return AotKernel(scored_kernel, signature, constants, **shape, hot=True, tensor_cores=unit, archs=archs)


def _aot_order(tokens: int, experts: int, used: int) -> AotKernel:
    plan = choose(tokens, 2048, experts)
    assert isinstance(plan, Many)
    signature = {f"{name}_ptr": "*i32" for name in ("expert", "count", "token", "place", "start")}
    signature |= {"tally_ptr": "*i64"} | dict.fromkeys(("tokens", "tiles", "each"), "i32")
    constants = {"TOKENS": plan.tokens, "E": experts, "EXPERTS": plan.experts, "K": used, "CHOICES": 8}
    constants |= {"CHUNK": chunk(plan), "TALLY": True}
    return AotKernel(order_kernel, signature, constants, num_warps=8, hot=True, archs=ONE_OF_EACH)


def chunk(plan: Many) -> int:
    """Return the number of tiles whose counts a program of the second kernel adds up at once."""
    return max(1, 16_384 // plan.experts)


AOT = (
    _aot_scored(8192, 2048, 128, 8, "HGMMA", *ONE_OF_EACH),
    _aot_scored(256, 7168, 256, 8, "MMA", "sm_90", grouped=True),
    _aot_order(8192, 128, 8),
)
