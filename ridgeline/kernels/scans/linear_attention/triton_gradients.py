"""The gradients of linear attention with all chunks side by side: the backward kernels of training.

With S the state before a chunk and D the gradient of the state after it, both of triton_chunked.py:

    dA_ij = do_i · v_j for j <= i;    dv = Aᵀ do + (k exp(c - c_j)) D
    dq_i = exp(c_i) (S do_i) + Σ_j dA_ij k_j exp(c_i - c_j)
    dk_j = exp(c - c_j) (D v_j) + Σ_i dA_ij q_i exp(c_i - c_j)

A decay's gradient is the sum of all that passes its token: from the tokens before it, or the state before the chunk, to
its own token and those behind it, or the state after the chunk. docs/recurrent-math.md derives it.

Legend: that of triton_chunked.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.scans.linear_attention.triton_chunked import (
    FADES,
    NARROW,
    PART,
    PLACES,
    SHAPE,
    WIDE,
    half,
    load_fades,
)


@triton.jit
def _linear_attention_dv(
    told_ptr, v_ptr, do_ptr, within_ptr, after_ptr, dv_ptr, d_within_ptr, first_ptr, length_ptr,
    v_token, do_token, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Compute dv of a chunk's head, [T, H, V], and dA with the scale, float32 [C, H, L, L]."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    length = tl.load(length_ptr + chunk)
    if length == 0:
        return
    i = tl.arange(0, L)
    token = tl.load(first_ptr + chunk).to(tl.int64) + i[:, None]
    live = (i < length)[:, None]
    of_chunk = chunk.to(tl.int64) * H + head
    square = of_chunk * L * L + i[:, None] * L + i[None, :]
    within = tl.trans(tl.load(within_ptr + square, mask=live, other=0))
    d_within = tl.zeros((L, L), tl.float32)
    for tile in range(0, V, BV):
        value = tile + tl.arange(0, BV)
        in_v = (value < V)[None, :]
        v = tl.load(v_ptr + token * v_token + head * V + value[None, :], mask=live & in_v, other=0)
        do = tl.load(do_ptr + token * do_token + head * V + value[None, :], mask=live & in_v, other=0)
        d_within = tl.dot(do, tl.trans(v), d_within, input_precision="ieee")
        dv = tl.dot(within, do, input_precision="ieee")
        for tile_k in range(0, K, BK):
            key = tile_k + tl.arange(0, BK)
            in_k = key < K
            told = tl.load(told_ptr + (token * H + head) * K + key[None, :], mask=live & in_k[None, :], other=0)
            after_at = after_ptr + (of_chunk * K + key[:, None]) * V + value[None, :]
            after = tl.load(after_at, mask=in_k[:, None] & in_v, other=0)
            dv = tl.dot(told, after, dv, input_precision="ieee")
        tl.store(dv_ptr + (token * H + head) * V + value[None, :], dv.to(dv_ptr.dtype.element_ty), mask=live & in_v)
    tl.store(d_within_ptr + square, tl.where(i[:, None] >= i[None, :], d_within * scale, 0))


@triton.jit
def _linear_attention_d_within(
    q_ptr, k_ptr, fade_ptr, d_within_ptr, dq_ptr, dk_ptr, first_ptr, length_ptr,
    q_token, k_token, fade_token, fade_head,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, L: tl.constexpr, PART: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Compute what a chunk's other tokens make of dq and dk of PART tokens, BK channels, float32 [T, H, K]. What tokens
    make of their own is left out: no decay is between, so a decay's gradient has nothing of it to cancel.

    Keys of tokens before these are faded to the beginning of the part, and queries of those behind it from its end on,
    so no factor is above one. The part's own tokens are compared one by one.
    """
    tile, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tile % (L // PART) * PART
    length = tl.load(length_ptr + chunk)
    if begin >= length:
        return
    i, p, key = tl.arange(0, L), tl.arange(0, PART), tile // (L // PART) * BK + tl.arange(0, BK)
    first = tl.load(first_ptr + chunk).to(tl.int64)
    token_i, token_p = first + i, first + begin + p
    in_k = (key < K)[None, :]
    live = (begin + p < length)[:, None] & in_k
    q = tl.load(q_ptr + token_p[:, None] * q_token + head * K + key[None, :], mask=live, other=0)
    k = tl.load(k_ptr + token_p[:, None] * k_token + head * K + key[None, :], mask=live, other=0)
    dtype: tl.constexpr = k.dtype
    q, k = q.to(tl.float32), k.to(tl.float32)
    since = tl.cumsum(load_fades(fade_ptr, token_p, head, key, live, fade_token, fade_head, EACH), 0)
    square = d_within_ptr + (chunk.to(tl.int64) * H + head) * L * L
    # Keys before the part
    before = (i < begin)[:, None] & in_k
    k_far = tl.load(k_ptr + token_i[:, None] * k_token + head * K + key[None, :], mask=before, other=0)
    later = (i + 1 < begin)[:, None] & in_k
    fade = load_fades(fade_ptr, token_i + 1, head, key, later, fade_token, fade_head, EACH)
    k_far = k_far.to(tl.float32) * tl.exp(tl.cumsum(fade, 0, reverse=True))
    weight = tl.load(square + (begin + p)[:, None] * L + i[None, :], mask=(i < begin)[None, :], other=0)
    dq = tl.dot(weight.to(dtype), k_far.to(dtype), input_precision="ieee") * tl.exp(since)
    # Queries behind the part
    end = begin + PART
    behind = ((i >= end) & (i < length))[:, None] & in_k
    q_far = tl.load(q_ptr + token_i[:, None] * q_token + head * K + key[None, :], mask=behind, other=0)
    fade = load_fades(fade_ptr, token_i, head, key, behind, fade_token, fade_head, EACH)
    q_far = q_far.to(tl.float32) * tl.exp(tl.cumsum(fade, 0))
    weight = tl.load(square + (begin + p)[:, None] + i[None, :] * L, mask=((i >= end) & (i < length))[None, :], other=0)
    later = ((p + 1 < PART) & (begin + p + 1 < length))[:, None] & in_k
    fade = load_fades(fade_ptr, token_p + 1, head, key, later, fade_token, fade_head, EACH)
    left = tl.exp(tl.cumsum(fade, 0, reverse=True))
    dk = tl.dot(weight.to(dtype), q_far.to(dtype), input_precision="ieee") * left
    # The part itself
    met = tl.exp(tl.minimum(since[:, None, :] - since[None, :, :], 0))
    weight = tl.load(square + (begin + p)[:, None] * L + (begin + p)[None, :])
    met *= tl.where(p[:, None] > p[None, :], weight, 0)[:, :, None]
    dq += tl.sum(met * k[None, :, :], 1)
    dk += tl.sum(met * q[:, None, :], 0)
    at = (token_p[:, None] * H + head) * K + key[None, :]
    tl.store(dq_ptr + at, dq, mask=live)
    tl.store(dk_ptr + at, dk, mask=live)


@triton.jit
def _linear_attention_dk(
    q_ptr, k_ptr, v_ptr, fade_ptr, do_ptr, before_ptr, after_ptr, dq_within_ptr, dk_within_ptr,
    dq_ptr, dk_ptr, d_fade_ptr, first_ptr, length_ptr,
    q_token, k_token, v_token, do_token, fade_token, fade_head, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """Compute BK channels of a chunk's dq, dk and the decays' gradients, [T, H, K]. d_fade_ptr: None: the decays need
    none."""
    tile, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(length_ptr + chunk)
    if length == 0:
        return
    i, key = tl.arange(0, L), tile * BK + tl.arange(0, BK)
    token = tl.load(first_ptr + chunk).to(tl.int64) + i
    in_k, rows = key < K, token[:, None]
    is_token = (i < length)[:, None]
    live = is_token & in_k[None, :]
    of_chunk = chunk.to(tl.int64) * H + head
    dq = tl.zeros((L, BK), tl.float32)
    dk = tl.zeros((L, BK), tl.float32)
    own = tl.zeros((L,), tl.float32)
    across = tl.zeros((BK,), tl.float32)
    for tile_v in range(0, V, BV):
        value = tile_v + tl.arange(0, BV)
        in_v = (value < V)[None, :]
        v = tl.load(v_ptr + rows * v_token + head * V + value[None, :], mask=is_token & in_v, other=0)
        do = tl.load(do_ptr + rows * do_token + head * V + value[None, :], mask=is_token & in_v, other=0)
        state_at = (of_chunk * K + key[:, None]) * V + value[None, :]
        before = tl.load(before_ptr + state_at, mask=in_k[:, None] & in_v, other=0)
        after = tl.load(after_ptr + state_at, mask=in_k[:, None] & in_v, other=0)
        dq = tl.dot(do, tl.trans(before), dq, input_precision="ieee")
        dk = tl.dot(v, tl.trans(after), dk, input_precision="ieee")
        own += tl.sum(do.to(tl.float32) * v.to(tl.float32), 1)
        if d_fade_ptr is not None:
            across += tl.sum(before.to(tl.float32) * after.to(tl.float32), 1)
    fade = load_fades(fade_ptr, token, head, key, live, fade_token, fade_head, EACH)
    dq *= tl.exp(tl.cumsum(fade, 0)) * scale
    behind = (i + 1 < length)[:, None] & in_k[None, :]
    later = load_fades(fade_ptr, token + 1, head, key, behind, fade_token, fade_head, EACH)
    dk *= tl.exp(tl.cumsum(later, 0, reverse=True))
    at = (rows * H + head) * K + key[None, :]
    q = tl.load(q_ptr + rows * q_token + head * K + key[None, :], mask=live, other=0).to(tl.float32)
    k = tl.load(k_ptr + rows * k_token + head * K + key[None, :], mask=live, other=0).to(tl.float32)
    dq += tl.load(dq_within_ptr + at, mask=live, other=0)  # all from tokens before, but none from this one
    dk_within = tl.load(dk_within_ptr + at, mask=live, other=0)
    own = (own * scale)[:, None]
    tl.store(dq_ptr + at, (dq + own * k).to(dq_ptr.dtype.element_ty), mask=live)
    tl.store(dk_ptr + at, (dk + dk_within + own * q).to(dk_ptr.dtype.element_ty), mask=live)
    if d_fade_ptr is not None:
        here = q * dq - k * dk_within  # what ends at this token, without what starts here and ends in the chunk
        from_here = k * dk
        d_fade = tl.cumsum(here, 0, reverse=True) + tl.cumsum(from_here, 0) - from_here
        d_fade += (across * tl.exp(tl.sum(fade, 0)))[None, :]
        tl.store(d_fade_ptr + at, d_fade, mask=live)


_STATES = {**SHAPE, "V": 512, "BK": WIDE, "BV": WIDE}
AOT = (
    AotKernel(
        _linear_attention_dv,
        half("told", "v", "do", "within", "after", "dv")
        | PLACES
        | {"d_within_ptr": "*fp32", "v_token": "i32:16", "do_token": "i32:16", "scale": "fp32"},
        _STATES,
        hot=True,
        tensor_cores="MMA",
        archs=ONE_OF_EACH,
    ),
    AotKernel(
        _linear_attention_d_within,
        half("q", "k") | FADES | PLACES | dict.fromkeys(("d_within_ptr", "dq_ptr", "dk_ptr"), "*fp32"),
        {**SHAPE, "BK": NARROW, "PART": PART, "EACH": True},
        hot=True,
        tensor_cores="MMA",
        archs=ONE_OF_EACH,
    ),
    AotKernel(
        _linear_attention_dk,
        half("q", "k", "v", "do", "before", "after", "dq", "dk")
        | FADES
        | PLACES
        | dict.fromkeys(("dq_within_ptr", "dk_within_ptr", "d_fade_ptr"), "*fp32")
        | {"v_token": "i32:16", "do_token": "i32:16", "scale": "fp32"},
        {**_STATES, "EACH": True},
        num_warps=8,
        hot=True,
        tensor_cores="MMA",
        archs=ONE_OF_EACH,
    ),
)
