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

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.scans.gated_delta.triton_step import aot_types
from ridgeline.kernels.scans.linear_attention.triton_delta import inverse, log_decay
from ridgeline.kernels.scans.metadata import CHUNK_TYPES

CHUNK = 64
PART = 16  # tokens of the blocks on the diagonal that are inverted as a batch
WARPS = 4
REGISTERS = 168  # of a thread, so that a multiprocessor of Hopper has three programs


@triton.jit(do_not_specialize=["num_tokens", "begin"])
def _gated_delta_prepare(
    q_ptr, k_ptr, a_ptr, b_ptr, log_rate_ptr, dt_bias_ptr, solve_ptr, within_ptr, factors_ptr,
    start_ptr, first_ptr, length_ptr, row_ptr,
    q_token, k_token, a_token, b_token, num_tokens, begin, scale, norm_eps,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, L: tl.constexpr, PART: tl.constexpr,
    SHORT: tl.constexpr, SHARE: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Prepare a chunk for SHARE value heads of a key head. Rows of at most SHORT tokens are left out.

    solve_ptr, within_ptr: P and A, [G, T, L]: a chunk's tokens lie behind one another.
    factors_ptr: float32 [G, F, T]: what the products with raw keys and queries are multiplied by in x, in o and in the
        new state; and the chunk's decay.
    begin: the first chunk.
    AHEAD: the kernel in front of this one reads none of these chunks and writes nothing that is read here, so that no
        program waits for it but the last ones, which do nothing else: so the launch ends behind it all the same.
    """
    group, chunk = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if AHEAD:
        if chunk == tl.num_programs(1) - 1:
            if PDL:
                tl.extra.cuda.gdc_wait()
            return
    elif PDL:
        tl.extra.cuda.gdc_wait()
    chunk += begin
    length = tl.load(length_ptr + chunk)
    if length == 0:
        return
    row = tl.load(row_ptr + chunk)
    if tl.load(start_ptr + row + 1) - tl.load(start_ptr + row) <= SHORT:
        return
    i, key = tl.arange(0, L), tl.arange(0, BK)
    first = tl.load(first_ptr + chunk).to(tl.int64)
    key_head, live = group * SHARE // (G // H), i < length
    mask = live[:, None] & (key < K)[None, :]
    k_ptr += first * k_token + key_head * K
    q_ptr += first * q_token + key_head * K
    k = tl.load(k_ptr + i[:, None] * k_token + key[None, :], mask=mask, other=0)
    q = tl.load(q_ptr + i[:, None] * q_token + key[None, :], mask=mask, other=0)
    lower = i[:, None] > i[None, :]
    even = i[:, None] == i[None, :]
    keys_keys = tl.dot(k, tl.trans(k), input_precision="ieee")
    # Factors are added up as logarithms to base 2, so that a pair of tokens needs one product
    log_k = -0.5 * tl.log2(tl.sum(tl.where(even, keys_keys, 0), 1) + norm_eps)
    queries = tl.dot(q, tl.trans(q), input_precision="ieee")  # for its diagonal: fewer instructions than squares
    log_q = -0.5 * tl.log2(tl.sum(tl.where(even, queries, 0), 1) + norm_eps) + tl.log2(scale)
    queries_keys = tl.dot(q, tl.trans(k), input_precision="ieee")
    square = i[:, None] * L + i[None, :]
    gates = (a_ptr + first * a_token + i * a_token, b_ptr + first * b_token + i * b_token, log_rate_ptr, dt_bias_ptr)
    totals, betas = (), ()
    for part in tl.static_range(SHARE):  # all heads' queries, and then all heads' keys: fewer numbers are held at once
        head = group * SHARE + part
        total, whole, log_beta = _gates(gates, head, live, L)
        totals, betas = totals + (total,), betas + (log_beta,)  # type: ignore[assignment]  # noqa: RUF005
        of_head = factors_ptr + head.to(tl.int64) * 4 * num_tokens + first + i
        tl.store(of_head, tl.exp2(log_k + total), mask=live)
        tl.store(of_head + num_tokens, tl.exp2(log_q + total), mask=live)
        tl.store(of_head + 2 * num_tokens, tl.exp2(log_k + whole - total), mask=live)
        tl.store(of_head + 3 * num_tokens, tl.exp2(whole + tl.zeros((L,), tl.float32)), mask=live)
        within = queries_keys * tl.exp2((log_q + total)[:, None] + (log_k - total)[None, :])
        within = tl.where(lower | even, within, 0)
        at = (head.to(tl.int64) * num_tokens + first) * L
        tl.store(within_ptr + at + square, within.to(within_ptr.dtype.element_ty), mask=live[:, None])
    for part in tl.static_range(SHARE):
        head = group * SHARE + part
        total, log_beta = totals[part], betas[part]
        system = keys_keys * tl.exp2((log_k + total + log_beta)[:, None] + (log_k - total)[None, :])
        system = tl.where(lower, -system, 0)
        beta = tl.where(live, tl.exp2(log_beta), 0)
        solve = inverse(system, i, L, PART, k.dtype) * beta[None, :]
        at = (head.to(tl.int64) * num_tokens + first) * L
        tl.store(solve_ptr + at + square, solve.to(solve_ptr.dtype.element_ty), mask=live[:, None])


@triton.jit
def _gates(gates, head, live, L: tl.constexpr):
    """Return of a head's tokens the decays' running sum and whole sum, and β, all as logarithms to base 2."""
    a_ptr, b_ptr, log_rate_ptr, dt_bias_ptr = gates
    a = tl.load(a_ptr + head, mask=live, other=0)
    b = tl.load(b_ptr + head, mask=live, other=0).to(tl.float32)
    fades = log_decay(a, tl.load(log_rate_ptr + head), tl.load(dt_bias_ptr + head)) * 1.4426950408889634
    fades = tl.where(live, fades, 0)
    log_beta = -tl.log2(1 + tl.exp(-b))
    # A sum of one number: without it, each thread would load and compute what it needs of these, instead of one number
    log_beta = tl.cumsum(log_beta[:, None], 1).reshape((L,))
    return tl.cumsum(fades, 0), tl.sum(fades, 0), log_beta


def _aot(dtype: str, share: int = 1, ahead: bool = False) -> AotKernel:
    names = ("q_ptr", "k_ptr", "a_ptr", "b_ptr", "log_rate_ptr", "dt_bias_ptr", "start_ptr", "q_token", "k_token")
    types = {
        name: kind
        for name, kind in aot_types(dtype).items()
        if name in (*names, "a_token", "b_token", "scale", "norm_eps")
    }
    types |= (
        dict.fromkeys(("solve_ptr", "within_ptr"), dtype)
        | {"factors_ptr": "*fp32"}
        | dict.fromkeys(("num_tokens", "begin"), "i32")
    )
    types |= CHUNK_TYPES
    constants = {"H": 16, "G": 32, "K": 128, "BK": 128, "L": CHUNK, "PART": PART, "SHORT": 1}
    constants |= {"SHARE": share, "AHEAD": ahead}
    return AotKernel(
        _gated_delta_prepare,
        types,
        constants,
        num_warps=WARPS,
        hot=True,
        tensor_cores="MMA",
        archs=ONE_OF_EACH,
        registers=REGISTERS,
    )


AOT = (_aot("*bf16"), _aot("*bf16", share=2), _aot("*bf16", ahead=True))
