"""The gated delta rule token by token: a program has some columns of a head's state in registers.

Its time is that of the state's way through memory, once in and once out, if a row has one token. What a token does with
the state is the same arithmetic whatever comes before or behind it, so the bits do not depend on how a row was cut into
steps.

Legend: that of op.py.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.scans.gated_delta.op import NORM_EPS, DeltaInputs
from ridgeline.kernels.scans.linear_attention.triton_delta import log_decay
from ridgeline.kernels.scans.metadata import ROW_TYPES, ScanMetadata


@triton.jit
def _token(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, token, q_token, k_token, v_token, a_token, b_token,
    key_head, head, key, value, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Return a token's query, key and value, and the numbers from which its decay and β are computed."""
    t = tl.cast(token, tl.int64)
    q = tl.load(q_ptr + t * q_token + key_head * K + key, mask=(key < K), other=0)
    k = tl.load(k_ptr + t * k_token + key_head * K + key, mask=(key < K), other=0)
    v = tl.load(v_ptr + t * v_token + head * V + value, mask=(value < V), other=0)
    a = tl.load(a_ptr + t * a_token + head)
    b = tl.load(b_ptr + t * b_token + head)
    return q, k, v, a, b


@triton.jit
def _gated_delta_step(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, log_rate_ptr, dt_bias_ptr, states_ptr, o_ptr,
    start_ptr, reads_ptr, writes_ptr, fresh_ptr, marks_ptr, marked_ptr,
    q_token, k_token, v_token, a_token, b_token, states_block, scale, norm_eps,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EVERY: tl.constexpr, LONGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run a row's tokens over BV columns of a head's state. LONGEST: rows of more tokens are left to others; 0: no row
    is. EVERY: every row has one token."""
    SINGLE: tl.constexpr = EVERY or LONGEST == 1  # a row that runs has one token
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_head = head // (G // H)
    key, value = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    inside = (key < K)[:, None] & (value < V)[None, :]
    cell = head * K * V + key[:, None] * V + value[None, :]
    # States and metadata are those that the step began with: nothing has to be waited for
    columns = V * (1 - tl.load(fresh_ptr + row).to(tl.int32))  # how much of a state there is
    if EVERY:
        start, end = row, row + 1
    else:
        start, end = tl.load(start_ptr + row), tl.load(start_ptr + row + 1)
        if LONGEST > 0:
            end = tl.where(end - start <= LONGEST, end, start)
        columns = tl.where(start < end, columns, 0)
    held = (key < K)[:, None] & (value < columns)[None, :]
    state = tl.load(states_ptr + tl.load(reads_ptr + row) * states_block + cell, mask=held, other=0)
    log_rate, dt_bias = tl.load(log_rate_ptr + head), tl.load(dt_bias_ptr + head)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if start < end:
        if SINGLE:
            end = start + 1  # the loop is none then
        mark = tl.load(marks_ptr + row)
        q, k, v, a, b = _token(
            q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, start, q_token, k_token, v_token, a_token, b_token,
            key_head, head, key, value, K, V,
        )  # fmt: skip
        for token in range(start, end):
            next_q, next_k, next_v, next_a, next_b = q, k, v, a, b
            if not SINGLE:  # ask for the next token's before this one's are used
                next_q, next_k, next_v, next_a, next_b = _token(
                    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, tl.minimum(token + 1, end - 1),
                    q_token, k_token, v_token, a_token, b_token, key_head, head, key, value, K, V,
                )  # fmt: skip
            q, k = q.to(tl.float32), k.to(tl.float32)
            q = q * (tl.rsqrt(tl.sum(q * q, 0) + norm_eps) * scale)
            k = k * tl.rsqrt(tl.sum(k * k, 0) + norm_eps)
            decay = tl.exp(log_decay(a, log_rate, dt_bias))
            beta = 1 / (1 + tl.exp(-b.to(tl.float32)))
            told = tl.sum(state * k[:, None], 0)
            read = tl.sum(state * q[:, None], 0)
            moved = beta * (v.to(tl.float32) - decay * told)
            state = decay * state + k[:, None] * moved[None, :]
            o = decay * read + tl.sum(q * k, 0) * moved
            o_at = o_ptr + (tl.cast(token, tl.int64) * G + head) * V + value
            tl.store(o_at, o.to(o_ptr.dtype.element_ty), mask=value < V)
            if token + 1 - start == mark:
                tl.store(states_ptr + tl.load(marked_ptr + row) * states_block + cell, state, mask=inside)
            q, k, v, a, b = next_q, next_k, next_v, next_a, next_b
        tl.store(states_ptr + tl.load(writes_ptr + row) * states_block + cell, state, mask=inside)


class Cut(NamedTuple):
    """The columns of a state that a program has, and its warps."""

    columns: int
    warps: int


CUT = Cut(64, 4)


def step(
    given: DeltaInputs,
    states_NGKV: Tensor,
    metadata: ScanMetadata,
    o_TGV: Tensor,
    longest: int = 0,
    cut: Cut = CUT,
    single: bool = False,
) -> None:
    """Run the rows of at most `longest` tokens, or all of them if it is 0, and fill their outputs in. `single`: every
    row has one token."""
    q_THK, k_THK, v_TGV, a_TG, b_TG = given.q_THK, given.k_THK, given.v_TGV, given.a, given.b_TG
    (heads, keys), (value_heads, values) = k_THK.shape[1:], v_TGV.shape[1:]
    columns = min(cut.columns, triton.next_power_of_2(values))
    _gated_delta_step[(triton.cdiv(values, columns), value_heads, metadata.num_rows)](
        q_THK, k_THK, v_TGV, a_TG, b_TG, given.log_rate_G, given.dt_bias, states_NGKV, o_TGV, *metadata.of_rows,
        q_THK.stride(0), k_THK.stride(0), v_TGV.stride(0), a_TG.stride(0), b_TG.stride(0), states_NGKV.stride(0),
        given.scale, NORM_EPS,
        H=heads, G=value_heads, K=keys, V=values, BK=triton.next_power_of_2(keys), BV=columns,
        EVERY=single, LONGEST=longest, num_warps=cut.warps, **launch_options(o_TGV.device),
    )  # fmt: skip


def aot_types(dtype: str = "*bf16") -> dict[str, str]:
    """Return the types of the arguments that all kernels of the rule have."""
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "a_ptr", "b_ptr", "o_ptr"), dtype)
    types |= dict.fromkeys(("log_rate_ptr", "dt_bias_ptr", "states_ptr"), "*fp32")
    types |= ROW_TYPES
    types |= dict.fromkeys(("q_token", "k_token", "v_token", "states_block"), "i32:16")
    return types | {"a_token": "i32", "b_token": "i32", "scale": "fp32", "norm_eps": "fp32"}


def _aot(single: bool, longest: int) -> AotKernel:
    constants = {"H": 16, "G": 32, "K": 128, "V": 128, "BK": 128, "BV": CUT.columns}
    constants |= {"EVERY": single, "LONGEST": longest}
    return AotKernel(_gated_delta_step, aot_types(), constants, num_warps=CUT.warps, hot=True, archs=ONE_OF_EACH)


AOT = (_aot(True, 0), _aot(False, 1), _aot(False, 0))
