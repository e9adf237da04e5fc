"""Routing of a few dozen tokens in one launch.

A program keeps some experts' rows in registers, asked for before the kernel before it has ended, and multiplies them
with some tokens. It normalises these itself: that costs less than another launch. The last program to arrive has all
scores. It chooses for all tokens, and counts and orders the pairs, on one tile in registers.

Legend:
    R  experts' rows of a program
    B  inputs, padded to a power of two
    T  tokens, padded to a power of two
    E  experts, padded to a power of two
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.route.choice import (
    aot_rules,
    choose_experts,
    counted_before,
    idle_tokens,
    store_choice,
    tokens_alive,
)
from ridgeline.kernels.route.choose import Few, choose


@triton.jit
def _token(x_ptr, residual_ptr, token, x_stride, residual_stride, input_1B, kept_1B, RESIDUAL: tl.constexpr):
    """Return x + residual of a token, rounded to x's dtype, and 0 past the last input."""
    s_1B = tl.load(x_ptr + token * x_stride + input_1B, mask=kept_1B, other=0.0)
    if RESIDUAL:
        r_1B = tl.load(residual_ptr + token * residual_stride + input_1B, mask=kept_1B, other=0.0)
        s_1B = (s_1B.to(tl.float32) + r_1B.to(tl.float32)).to(s_1B.dtype)
    return s_1B


@triton.jit(do_not_specialize=["tokens", "eps", "scale"])
def few_kernel(
    x_ptr, residual_ptr, norm_ptr, router_ptr, bias_ptr, correction_ptr, expert_scale_ptr, live_ptr, tally_ptr,
    n_ptr, s_ptr, expert_ptr, weight_ptr, token_ptr, place_ptr, start_ptr, logits_ptr, arrival_ptr,
    x_stride, residual_stride, tokens, eps, scale,
    M: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EACH: tl.constexpr, TOKENS: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, LIVE: tl.constexpr, TALLY: tl.constexpr,
    E: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr, SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, PAIR: tl.constexpr,
    GROUPS_PADDED: tl.constexpr, BIAS: tl.constexpr, CORRECTION: tl.constexpr, EXPERT_SCALE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute `route`. Program (i, j) multiplies experts from i * ROWS on with tokens from j * EACH on.

    logits: float32 [TOKENS, EXPERTS].
    arrival: a counter, 0 between launches.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    input_1B = tl.arange(0, BLOCK)[None, :]
    kept_1B = input_1B < M
    w_RB = tl.load(router_ptr + tl.minimum(row_R, E - 1)[:, None] * M + input_1B, mask=kept_1B, other=0.0)
    if NORM:
        norm_1B = tl.load(norm_ptr + input_1B, mask=kept_1B, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()

    begin = tl.program_id(1) * EACH
    end = tl.minimum(begin + EACH, tokens)
    s_1B = _token(x_ptr, residual_ptr, begin, x_stride, residual_stride, input_1B, kept_1B, RESIDUAL)
    for token in range(begin, end):
        if EACH > 1:  # ask for the next token before this one is done
            ahead = tl.minimum(token + 1, end - 1)
            next_1B = _token(x_ptr, residual_ptr, ahead, x_stride, residual_stride, input_1B, kept_1B, RESIDUAL)
        n_1B = s_1B
        writes = token % tl.num_programs(0) == tl.program_id(0)
        if RESIDUAL:  # noqa: SIM102
            if writes:
                tl.store(s_ptr + token * M + input_1B, s_1B, mask=kept_1B)
        if NORM:
            a_1B = s_1B.to(tl.float32)
            factor = tl.rsqrt(tl.sum(a_1B * a_1B, 1) / M + eps)[:, None]
            n_1B = (a_1B * factor * norm_1B.to(tl.float32)).to(s_1B.dtype)
            if writes:
                tl.store(n_ptr + token * M + input_1B, n_1B, mask=kept_1B)
        logit_R = tl.sum(w_RB.to(tl.float32) * n_1B.to(tl.float32), 1)
        tl.store(logits_ptr + token * EXPERTS + row_R, logit_R, mask=row_R < E)
        if EACH > 1:
            s_1B = next_1B

    tl.debug_barrier()  # until every thread's scores are written, before any thread of this program says so
    if tl.atomic_add(arrival_ptr, 1) == tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.store(arrival_ptr, 0)
        token_T = tl.arange(0, TOKENS)
        token_T1 = token_T[:, None]
        column_E = tl.arange(0, EXPERTS)
        scored_TE = (token_T1 < tokens) & (column_E < E)[None, :]
        logits_TE = tl.load(
            logits_ptr + token_T1 * EXPERTS + column_E[None, :], mask=scored_TE, other=0.0, cache_modifier=".cg"
        )
        expert_TK, weight_TK, chosen_TE = choose_experts(
            logits_TE, bias_ptr, correction_ptr, expert_scale_ptr, scale, E, EXPERTS, K, CHOICES, SIGMOID, RENORMALIZE,
            GROUPS, TOP_GROUPS, PAIR, GROUPS_PADDED, BIAS, CORRECTION, EXPERT_SCALE,
        )  # fmt: skip
        alive_T = tokens_alive(live_ptr, token_T, tokens, LIVE)
        alive_T1 = alive_T[:, None]
        taken_TE = (chosen_TE & alive_T1).to(tl.int32)
        count_E = tl.sum(taken_TE, 0)
        end_E = tl.cumsum(count_E, 0)
        place_TE = (end_E - count_E)[None, :] + counted_before(taken_TE, TOKENS)
        place_TK = tl.gather(place_TE, expert_TK, 1)
        choice_1K = tl.arange(0, CHOICES)[None, :]
        if LIVE:  # the pairs of all others lie behind, in their own order
            idle_T = counted_before(idle_tokens(token_T, alive_T, tokens), TOKENS)
            behind_TK = tl.sum(count_E, 0) + idle_T[:, None] * K + choice_1K
            place_TK = tl.where(alive_T1, place_TK, behind_TK)
        store_choice(
            expert_ptr, weight_ptr, place_ptr, expert_TK, weight_TK, place_TK, token_T1, tokens, alive_T1, E, K, CHOICES
        )  # fmt: skip
        kept_TK = (token_T1 < tokens) & (choice_1K < K)
        tl.store(token_ptr + place_TK, token_T1 + choice_1K * 0, mask=kept_TK)
        tl.store(start_ptr, 0)
        tl.store(start_ptr + 1 + column_E, end_E, mask=column_E < E)
        if TALLY:
            tally_E = tl.load(tally_ptr + column_E, mask=column_E < E, other=0)
            tl.store(tally_ptr + column_E, tally_E + count_E, mask=column_E < E)


def _aot(tokens: int, width: int, experts: int, used: int, *archs: str, grouped: bool = False) -> AotKernel:
    plan = choose(tokens, width, experts)
    assert isinstance(plan, Few)
    pointers = ("x", "residual", "norm", "router", "bias", "expert_scale", "n", "s")
    signature = {f"{name}_ptr": "*bf16" for name in pointers}
    signature |= {f"{name}_ptr": "*i32" for name in ("expert", "token", "place", "start", "arrival")}
    signature |= {f"{name}_ptr": "*fp32" for name in ("correction", "weight", "logits")}
    signature |= {"live_ptr": "*i1", "tally_ptr": "*i64", "x_stride": "i32:16", "residual_stride": "i32:16"}
    signature |= {"tokens": "i32", "eps": "fp32", "scale": "fp32"}
    constants = {"M": width, "BLOCK": plan.block, "ROWS": plan.rows, "EACH": plan.each, "TOKENS": plan.tokens}
    constants |= dict.fromkeys(("NORM", "RESIDUAL", "LIVE", "TALLY"), True)
    constants |= aot_rules(experts, plan.experts, used, grouped=grouped)
    return AotKernel(few_kernel, signature, constants, num_warps=plan.warps, hot=True, archs=archs)


AOT = (
    _aot(1, 2048, 128, 8, *ONE_OF_EACH),
    _aot(64, 2048, 128, 8, "sm_90"),
    _aot(1, 7168, 256, 8, "sm_90", grouped=True),
)
