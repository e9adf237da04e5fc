"""The first of two kernels for long rows: it computes of a chunk what needs no state.

With the decays' running sum c_i, unit keys k_i, and x_i = v_i - exp(c_i) · Sᵀ k_i (S: the state before the chunk), the
changes u that a chunk's tokens make are those of a triangular system:

    (I + L) u = β x,    L_ij = β_i exp(c_i - c_j) k_i · k_j for j < i

This kernel inverts I + L. The other one (triton_chunks.py) multiplies, in the order of the chunks:

    u = P x,    o_i = exp(c_i) · Sᵀ q_i + Σ_j A_ij u_j,    S ← exp(c) S + Σ_j exp(c - c_j) k_j ⊗ u_j

P = (I + L)⁻¹ β and A_ij = exp(c_i - c_j) q_i · k_j for j <= i, which come from here, have the activations' dtype. All
their entries are at most one in size (A's: the scale), because each token's change of a state shortens it.

Legend: that of op.py, and
    L  tokens of a chunk
    F  factors of a token
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.gated_delta.triton_step import aot_types, log_decay

CHUNK = 64
PART = 16  # tokens of the blocks on the diagonal that are inverted row by row


@triton.jit(do_not_specialize=["num_tokens"])
def _gated_delta_prepare(
    q_ptr, k_ptr, a_ptr, b_ptr, log_rate_ptr, dt_bias_ptr, solve_ptr, within_ptr, factors_ptr,
    start_ptr, first_ptr, length_ptr, row_ptr,
    q_token, k_token, a_token, b_token, num_tokens, scale, norm_eps,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, L: tl.constexpr, PART: tl.constexpr,
    SHORT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Prepare a chunk for all value heads of a key head. Rows of at most SHORT tokens are left out.

    solve_ptr, within_ptr: P and A, [G, T, L]: a chunk's tokens lie behind one another.
    factors_ptr: float32 [G, F, T]: what the products with raw keys and queries are multiplied by in x, in o and in the
        new state; and the chunk's decay.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, key_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(length_ptr + chunk)
    if length == 0:
        return
    row = tl.load(row_ptr + chunk)
    if tl.load(start_ptr + row + 1) - tl.load(start_ptr + row) <= SHORT:
        return
    i, key = tl.arange(0, L), tl.arange(0, BK)
    first = tl.load(first_ptr + chunk).to(tl.int64)
    token = first + i
    live = i < length
    mask = live[:, None] & (key < K)[None, :]
    q_ptr, k_ptr = q_ptr + first * q_token + key_head * K, k_ptr + first * k_token + key_head * K
    k = tl.load(k_ptr + i[:, None] * k_token + key[None, :], mask=mask, other=0)
    q = tl.load(q_ptr + i[:, None] * q_token + key[None, :], mask=mask, other=0)
    wide_k, wide_q = k.to(tl.float32), q.to(tl.float32)
    of_k = tl.rsqrt(tl.sum(wide_k * wide_k, 1) + norm_eps)
    of_q = tl.rsqrt(tl.sum(wide_q * wide_q, 1) + norm_eps) * scale
    keys_keys = tl.dot(k, tl.trans(k), input_precision="ieee") * of_k[:, None] * of_k[None, :]
    queries_keys = tl.dot(q, tl.trans(k), input_precision="ieee") * of_q[:, None] * of_k[None, :]
    before, upto = i[:, None] > i[None, :], i[:, None] >= i[None, :]
    for g in range(G // H):
        head = key_head * (G // H) + g
        a = tl.load(a_ptr + token * a_token + head, mask=live, other=0)
        b = tl.load(b_ptr + token * b_token + head, mask=live, other=0).to(tl.float32)
        fades = tl.where(live, log_decay(a, tl.load(log_rate_ptr + head), tl.load(dt_bias_ptr + head)), 0)
        beta = tl.where(live, 1 / (1 + tl.exp(-b)), 0)
        total = tl.cumsum(fades, 0)
        whole = tl.sum(fades, 0)
        fade = tl.exp(tl.minimum(total[:, None] - total[None, :], 0))
        system = tl.where(before, keys_keys * fade * beta[:, None], 0)
        solve = _inverse(system, i, L, PART, k.dtype) * beta[None, :]
        within = tl.where(upto, queries_keys * fade, 0)
        at = (head.to(tl.int64) * num_tokens + first) * L
        square = i[:, None] * L + i[None, :]
        tl.store(solve_ptr + at + square, solve.to(solve_ptr.dtype.element_ty), mask=live[:, None])
        tl.store(within_ptr + at + square, within.to(within_ptr.dtype.element_ty), mask=live[:, None])
        factor_ptr = factors_ptr + head.to(tl.int64) * 4 * num_tokens + token
        tl.store(factor_ptr, of_k * tl.exp(total), mask=live)
        tl.store(factor_ptr + num_tokens, of_q * tl.exp(total), mask=live)
        tl.store(factor_ptr + 2 * num_tokens, of_k * tl.exp(whole - total), mask=live)
        tl.store(factor_ptr + 3 * num_tokens, tl.exp(whole + tl.zeros((L,), tl.float32)), mask=live)


@triton.jit
def _inverse(system, i, L: tl.constexpr, PART: tl.constexpr, dtype: tl.constexpr):
    """Return (I + system)⁻¹, system being strictly lower triangular. Blocks of two tokens on the diagonal are inverted
    by a change of sign, larger ones row by row in float32. Then neighbours become one block of twice the size, until
    there is one.

    Entries of both matrices are at most one in size, so float16 has three digits of them: more than the result keeps.
    """
    BLOCKS: tl.constexpr = L // PART
    operand: tl.constexpr = tl.float32 if dtype == tl.float32 else tl.float16
    if PART == 2:
        alike = (i // 2)[:, None] == (i // 2)[None, :]
        result = (i[:, None] == i[None, :]).to(tl.float32) - tl.where(alike, system, 0)
    else:
        block, place = tl.arange(0, BLOCKS), tl.arange(0, PART)
        same = block[:, None, None, None] == block[None, None, :, None]
        parts = -tl.sum(tl.where(same, tl.reshape(system, (BLOCKS, PART, BLOCKS, PART)), 0), 2)
        for r in range(2, PART):  # rows up to r - 1 are done, row r is that of -system
            at = (place == r)[None, :, None]
            this = tl.sum(tl.where(at, parts, 0), 1)
            this += tl.sum(this[:, :, None] * parts, 1)
            parts = tl.where(at, this[:, None, :], parts)
        parts += (place[:, None] == place[None, :]).to(tl.float32)[None, :, :]
        result = tl.reshape(tl.where(same, parts[:, :, None, :], 0), (L, L))
    for doubling in tl.static_range(5):
        if PART * 2**doubling < L:
            one, two = i // (PART * 2**doubling), i // (PART * 2 ** (doubling + 1))
            beside = (two[:, None] == two[None, :]) & (one[:, None] > one[None, :])
            half = result.to(operand)
            step = tl.dot(half, tl.where(beside, system, 0).to(operand), input_precision="ieee")
            result -= tl.dot(step.to(operand), half, input_precision="ieee")
    return result


def _aot(dtype: str) -> AotKernel:
    names = ("q_ptr", "k_ptr", "a_ptr", "b_ptr", "log_rate_ptr", "dt_bias_ptr", "start_ptr", "q_token", "k_token")
    types = {
        name: kind
        for name, kind in aot_types(dtype).items()
        if name in (*names, "a_token", "b_token", "scale", "norm_eps")
    }
    types |= dict.fromkeys(("solve_ptr", "within_ptr"), dtype) | {"factors_ptr": "*fp32", "num_tokens": "i32"}
    types |= dict.fromkeys(("first_ptr", "length_ptr", "row_ptr"), "*i32")
    constants = {"H": 16, "G": 32, "K": 128, "BK": 128, "L": CHUNK, "PART": PART, "SHORT": 1}
    return AotKernel(
        _gated_delta_prepare, types, constants, num_warps=8, hot=True, tensor_cores="MMA", archs=ONE_OF_EACH
    )


AOT = (_aot("*bf16"),)
