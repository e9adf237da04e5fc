"""The part of a chunk's work that needs no state before it: the first of the kernels for long rows.

With the decays' running sums c_i of a chunk, one for each channel, and the state S before it:

    o_i = (q_i exp(c_i))ᵀ S + Σ_j A_ij v_j,    S ← exp(c) S + Σ_j (k_j exp(c - c_j)) ⊗ v_j

and A_ij = Σ q_i k_j exp(c_i - c_j) for j <= i. The parentheses and A come from here, in the activations' dtype. A
program has some of a chunk's tokens. What they make with tokens before them is a product whose decays are counted from
the first of them, so that nothing overflows; their own are taken one after the other.

With a delta rule v_i becomes u_i, which solves a triangular system:

    (I + L) u = β (v - (k exp(c))ᵀ S),    L_ij = β_i Σ k_i k_j exp(c_i - c_j) for j < i

and P = (I + L)⁻¹ β comes from here, too.

Legend: that of op.py, and
    C  chunks
    L  tokens of a chunk
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.scans.linear_attention.triton_delta import inverse
from ridgeline.kernels.scans.linear_attention.triton_step import aot_constants, aot_types, fades
from ridgeline.kernels.scans.metadata import CHUNK_TYPES, ROW_TYPES

CHUNK = 64
PART = 16  # tokens of a program


@triton.jit
def _linear_attention_prepare(
    q_ptr, k_ptr, fade_ptr, beta_ptr, log_rate_ptr, dt_bias_ptr,
    within_ptr, system_ptr, asked_ptr, told_ptr, known_ptr, leaves_ptr,
    start_ptr, first_ptr, length_ptr, row_ptr,
    q_token, k_token, fade_token, fade_head, beta_token, scale, norm_eps,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, L: tl.constexpr, PART: tl.constexpr,
    EACH: tl.constexpr, DELTA: tl.constexpr, SHORT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Prepare PART tokens of a chunk for a head. Rows of at most SHORT tokens are left out.

    within_ptr: A, [C, H, L, L]. system_ptr: L, float32 of that shape. asked_ptr, told_ptr, known_ptr: q exp(c_i) with
    the scale, k exp(c - c_i) and k exp(c_i), [T, H, K]. leaves_ptr: exp(c), float32 [C, H, K].
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(length_ptr + chunk)
    if part * PART >= length:
        return
    row = tl.load(row_ptr + chunk)
    if tl.load(start_ptr + row + 1) - tl.load(start_ptr + row) <= SHORT:
        return
    first = tl.load(first_ptr + chunk).to(tl.int64)
    i, p, key = tl.arange(0, L), tl.arange(0, PART), tl.arange(0, BK)
    begin = part * PART
    in_k = (key < K)[None, :]
    channel = key if EACH else key * 0
    # The tokens before these, and what decays between the two
    i_before = ((i < begin) & (i < length))[:, None] & in_k
    token_i = (first + i)[:, None]
    k_far = tl.load(k_ptr + token_i * k_token + head * K + key[None, :], mask=i_before, other=0).to(tl.float32)
    if DELTA:
        k_far *= tl.rsqrt(tl.sum(k_far * k_far, 1) + norm_eps)[:, None]
    i_next = ((i + 1 < begin) & (i + 1 < length))[:, None] & in_k
    next_fade = fades(
        fade_ptr, token_i + 1, head, channel[None, :], i_next, log_rate_ptr, dt_bias_ptr, fade_token, fade_head,
        K, DELTA,
    )  # fmt: skip
    k_far *= tl.exp(tl.cumsum(next_fade, 0, reverse=True))
    # All of the chunk's decays: those before, and those behind
    exists = (i < length)[:, None] & in_k
    all_fades = fades(
        fade_ptr, token_i, head, channel[None, :], exists, log_rate_ptr, dt_bias_ptr, fade_token, fade_head, K, DELTA
    )  # fmt: skip
    before = tl.sum(tl.where((i < begin)[:, None], all_fades, 0), 0)
    behind = tl.sum(tl.where((i >= begin + PART)[:, None], all_fades, 0), 0)
    # The tokens themselves
    live = (begin + p < length)[:, None] & in_k
    token_p = (first + begin + p)[:, None]
    q = tl.load(q_ptr + token_p * q_token + head * K + key[None, :], mask=live, other=0)
    k = tl.load(k_ptr + token_p * k_token + head * K + key[None, :], mask=live, other=0)
    dtype: tl.constexpr = k.dtype
    q, k = q.to(tl.float32), k.to(tl.float32)
    if DELTA:
        q *= tl.rsqrt(tl.sum(q * q, 1) + norm_eps)[:, None]
        k *= tl.rsqrt(tl.sum(k * k, 1) + norm_eps)[:, None]
    fade = fades(
        fade_ptr, token_p, head, channel[None, :], live, log_rate_ptr, dt_bias_ptr, fade_token, fade_head, K, DELTA
    )  # fmt: skip
    p_next = ((p + 1 < PART) & (begin + p + 1 < length))[:, None] & in_k
    next_fade = fades(
        fade_ptr, token_p + 1, head, channel[None, :], p_next, log_rate_ptr, dt_bias_ptr, fade_token, fade_head,
        K, DELTA,
    )  # fmt: skip
    since = tl.cumsum(fade, 0)
    near = tl.exp(since)
    keys = tl.trans(k_far.to(dtype))
    within = tl.dot((q * near).to(dtype), keys, input_precision="ieee")
    system = tl.zeros((PART, L), tl.float32)
    if DELTA:
        system = tl.dot((k * near).to(dtype), keys, input_precision="ieee")
    upto = tl.zeros((BK,), tl.float32)
    for j in range(PART):
        there = key < tl.where(begin + j < length, K, 0)
        token_j = first + begin + j
        k_j = tl.load(k_ptr + token_j * k_token + head * K + key, mask=there, other=0).to(tl.float32)
        if DELTA:
            k_j *= tl.rsqrt(tl.sum(k_j * k_j, 0) + norm_eps)
        upto += fades(
            fade_ptr, token_j, head, channel, there, log_rate_ptr, dt_bias_ptr, fade_token, fade_head, K, DELTA
        )  # fmt: skip
        met = k_j[None, :] * tl.exp(tl.minimum(since - upto[None, :], 0))
        column = (i == begin + j)[None, :]
        within = tl.where(column & (p >= j)[:, None], tl.sum(q * met, 1)[:, None], within)
        if DELTA:
            system = tl.where(column & (p > j)[:, None], tl.sum(k * met, 1)[:, None], system)
    square = (chunk.to(tl.int64) * H + head) * L * L + (begin + p)[:, None] * L + i[None, :]
    tl.store(within_ptr + square, (within * scale).to(within_ptr.dtype.element_ty))
    reached = tl.exp(before[None, :] + since)
    at = (token_p * H + head) * K + key[None, :]
    tl.store(asked_ptr + at, (q * reached * scale).to(dtype), mask=live)
    tl.store(told_ptr + at, (k * tl.exp(tl.cumsum(next_fade, 0, reverse=True) + behind[None, :])).to(dtype), mask=live)
    if part == 0:
        leaves_at = leaves_ptr + (chunk.to(tl.int64) * H + head) * K + key
        tl.store(leaves_at, tl.exp(tl.sum(all_fades, 0)), mask=key < K)
    if DELTA:
        beta = tl.load(beta_ptr + (first + begin + p) * beta_token + head, mask=begin + p < length, other=0)
        beta = 1 / (1 + tl.exp(-beta.to(tl.float32)))
        tl.store(system_ptr + square, system * beta[:, None])
        tl.store(known_ptr + at, (k * reached).to(dtype), mask=live)


@triton.jit
def _delta_attention_solve(
    system_ptr, solve_ptr, beta_ptr, start_ptr, first_ptr, length_ptr, row_ptr, beta_token,
    H: tl.constexpr, L: tl.constexpr, PART: tl.constexpr, SHORT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute P of a chunk and head, [C, H, L, L]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(length_ptr + chunk)
    if length == 0:
        return
    row = tl.load(row_ptr + chunk)
    if tl.load(start_ptr + row + 1) - tl.load(start_ptr + row) <= SHORT:
        return
    i = tl.arange(0, L)
    live = i < length
    square = (chunk.to(tl.int64) * H + head) * L * L + i[:, None] * L + i[None, :]
    below = live[:, None] & (i[:, None] > i[None, :])
    system = tl.load(system_ptr + square, mask=below, other=0)
    token = tl.load(first_ptr + chunk).to(tl.int64) + i
    beta = tl.load(beta_ptr + token * beta_token + head, mask=live, other=0).to(tl.float32)
    beta = tl.where(live, 1 / (1 + tl.exp(-beta)), 0)
    solve = inverse(-system, i, L, PART, solve_ptr.dtype.element_ty) * beta[None, :]
    tl.store(solve_ptr + square, solve.to(solve_ptr.dtype.element_ty))


def _aot(delta: bool) -> AotKernel:
    types, constants = aot_types(delta), aot_constants(delta) | {"L": CHUNK, "PART": PART, "SHORT": 1}
    del constants["V"]
    for name in ("v_ptr", "o_ptr", "states_ptr", "v_token", "states_block", *(ROW_TYPES.keys() - {"start_ptr"})):
        del types[name]
    types |= dict.fromkeys(("within_ptr", "asked_ptr", "told_ptr"), "*bf16") | {"leaves_ptr": "*fp32"}
    types |= CHUNK_TYPES
    if delta:
        types |= {"system_ptr": "*fp32", "known_ptr": "*bf16"}
    else:
        constants |= {"system_ptr": None, "known_ptr": None}
    return AotKernel(
        _linear_attention_prepare, types, constants, num_warps=8, hot=not delta, tensor_cores="MMA", archs=ONE_OF_EACH
    )


def _aot_solve() -> AotKernel:
    types = {"system_ptr": "*fp32", "solve_ptr": "*bf16", "beta_ptr": "*bf16", "beta_token": "i32"}
    types |= {"start_ptr": "*i32"} | CHUNK_TYPES
    constants = {"H": 32, "L": CHUNK, "PART": PART, "SHORT": 1}
    return AotKernel(
        _delta_attention_solve, types, constants, num_warps=4, hot=True, tensor_cores="MMA", archs=ONE_OF_EACH
    )


AOT = (_aot(True), _aot(False), _aot_solve())
