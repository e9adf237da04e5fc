"""The gated delta rule over the chunks of long rows: the second of two kernels, which takes them in order.

A program has some columns of a head's state, and goes through its row's chunks. It holds the state as [columns, keys],
so that each product's left side is what it has in registers: the state, x or u, in that order. The right sides come
from memory, and are asked for ahead. triton_prepare.py has the formulas.

Legend: that of triton_prepare.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.scans.gated_delta.triton_prepare import CHUNK
from ridgeline.kernels.scans.gated_delta.triton_step import aot_types


@triton.jit(do_not_specialize=["num_tokens"])
def _gated_delta_chunks(
    q_ptr, k_ptr, v_ptr, solve_ptr, within_ptr, factors_ptr, states_ptr, o_ptr,
    start_ptr, reads_ptr, writes_ptr, fresh_ptr, marks_ptr, marked_ptr,
    k_token, v_token, states_block, num_tokens,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    L: tl.constexpr, SHORT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run the chunks of a row over BV columns of a head's state. Rows of at most SHORT tokens are left out."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = tl.load(start_ptr + row), tl.load(start_ptr + row + 1)
    if end - start <= SHORT:
        return
    i, key, value = tl.arange(0, L), tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    inside = (key < K)[:, None] & (value < V)[None, :]
    cell = head * K * V + key[:, None] * V + value[None, :]
    columns = V * (1 - tl.load(fresh_ptr + row).to(tl.int32))  # how much of a state there is
    held = (key < K)[:, None] & (value < columns)[None, :]
    read_ptr = states_ptr + tl.load(reads_ptr + row) * states_block
    state = tl.trans(tl.load(read_ptr + cell, mask=held, other=0))
    key_head = head // (G // H)
    k_cell = i[:, None] * k_token + key_head * K + key[None, :]  # and a query's
    v_cell = i[:, None] * v_token + head * V + value[None, :]
    o_cell = i[:, None] * (G * V) + head * V + value[None, :]
    in_v = (value < V)[None, :]
    mark = tl.load(marks_ptr + row)
    solve_ptr += head.to(tl.int64) * num_tokens * L
    within_ptr += head.to(tl.int64) * num_tokens * L
    factors_ptr += head.to(tl.int64) * 4 * num_tokens
    square = i[:, None] * L + i[None, :]
    for piece in range(2):  # up to the mark, and behind it
        first = start if piece == 0 else start + mark
        behind = start + mark if piece == 0 else end
        for begin in tl.range(first, behind, L, num_stages=STAGES):
            live = begin + i < behind
            mask = live[:, None] & (key < K)[None, :]
            k = tl.load(k_ptr + tl.cast(begin, tl.int64) * k_token + k_cell, mask=mask, other=0)
            q = tl.load(q_ptr + tl.cast(begin, tl.int64) * k_token + k_cell, mask=mask, other=0)
            v = tl.load(v_ptr + tl.cast(begin, tl.int64) * v_token + v_cell, mask=live[:, None] & in_v, other=0)
            solve = tl.load(solve_ptr + tl.cast(begin, tl.int64) * L + square, mask=live[:, None], other=0)
            within = tl.load(within_ptr + tl.cast(begin, tl.int64) * L + square, mask=live[:, None], other=0)
            of_x = tl.load(factors_ptr + begin + i, mask=live, other=0)
            of_o = tl.load(factors_ptr + num_tokens + begin + i, mask=live, other=0)
            of_state = tl.load(factors_ptr + 2 * num_tokens + begin + i, mask=live, other=0)
            decay = tl.load(factors_ptr + 3 * num_tokens + begin)
            left = state.to(k.dtype)
            told = tl.dot(left, tl.trans(k), input_precision="ieee")
            told = (told * -of_x[None, :]).to(k.dtype)
            u = tl.dot(tl.trans(v), tl.trans(solve), input_precision="ieee")
            u = tl.dot(told, tl.trans(solve), u, input_precision="ieee")
            o = tl.dot(left, tl.trans(q), input_precision="ieee") * of_o[None, :]
            o = tl.dot(u.to(k.dtype), tl.trans(within), o, input_precision="ieee")
            state = tl.dot((u * of_state[None, :]).to(k.dtype), k, state * decay, input_precision="ieee")
            o_at = o_ptr + tl.cast(begin, tl.int64) * (G * V) + o_cell
            tl.store(o_at, tl.trans(o).to(o_ptr.dtype.element_ty), mask=live[:, None] & in_v)
        block = tl.load(marked_ptr + row) if piece == 0 else tl.load(writes_ptr + row)
        if (piece == 1) | (mark > 0):
            tl.store(states_ptr + block * states_block + cell, tl.trans(state), mask=inside)


def _aot(columns: int, warps: int, stages: int, arch: str, dtype: str = "*bf16") -> AotKernel:
    """Registers spill where a row begins and ends; in the loop over chunks a handful are loaded again."""
    absent = ("q_token", "a_ptr", "b_ptr", "log_rate_ptr", "dt_bias_ptr", "a_token", "b_token", "scale", "norm_eps")
    types = {name: kind for name, kind in aot_types(dtype).items() if name not in absent}
    types |= dict.fromkeys(("solve_ptr", "within_ptr"), dtype) | {"factors_ptr": "*fp32", "num_tokens": "i32"}
    constants = {"H": 16, "G": 32, "K": 128, "V": 128, "BK": 128, "BV": columns, "L": CHUNK, "SHORT": 1}
    constants["STAGES"] = stages
    return AotKernel(_gated_delta_chunks, types, constants, num_warps=warps, tensor_cores="MMA", archs=(arch,))


AOT = (_aot(64, 4, 3, "sm_90"), _aot(128, 8, 3, "sm_90"), _aot(64, 4, 1, "gfx942"))
