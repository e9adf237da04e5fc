"""Linear attention over the chunks of long rows: the last of the kernels for them, which takes chunks in order.

A program has some columns of a head's state, and goes through its row's chunks. It holds the state as [columns, keys],
so that each product's left side is what it has in registers. triton_prepare.py has the formulas.

Legend: that of triton_prepare.py.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.scans.linear_attention.triton_prepare import CHUNK
from ridgeline.kernels.scans.linear_attention.triton_step import aot_constants, aot_types
from ridgeline.kernels.scans.metadata import ROW_TYPES


@triton.jit
def _linear_attention_chunks(
    asked_ptr, told_ptr, known_ptr, v_ptr, within_ptr, solve_ptr, leaves_ptr, states_ptr, o_ptr,
    start_ptr, reads_ptr, writes_ptr, fresh_ptr, marks_ptr, marked_ptr, of_ptr,
    v_token, states_block,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L: tl.constexpr,
    DELTA: tl.constexpr, SHORT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
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
    in_k, in_v = (key < K)[None, :], (value < V)[None, :]
    cell = head * K * V + key[:, None] * V + value[None, :]
    columns = V * (1 - tl.load(fresh_ptr + row).to(tl.int32))  # how much of a state there is
    held = (key < K)[:, None] & (value < columns)[None, :]
    state = tl.trans(tl.load(states_ptr + tl.load(reads_ptr + row) * states_block + cell, mask=held, other=0))
    mark = tl.load(marks_ptr + row)
    chunk = tl.load(of_ptr + row)
    for piece in range(2):  # up to the mark, and behind it
        first = start if piece == 0 else start + mark
        behind = start + mark if piece == 0 else end
        for begin in tl.range(first, behind, L, num_stages=STAGES):
            live = (begin + i < behind)[:, None]
            token = tl.cast(begin, tl.int64) + i[:, None]
            at = (token * H + head) * K + key[None, :]
            asked = tl.load(asked_ptr + at, mask=live & in_k, other=0)
            told = tl.load(told_ptr + at, mask=live & in_k, other=0)
            v = tl.load(v_ptr + token * v_token + head * V + value[None, :], mask=live & in_v, other=0)
            of_chunk = chunk.to(tl.int64) * H + head
            square = of_chunk * L * L + i[:, None] * L + i[None, :]
            within = tl.load(within_ptr + square, mask=live, other=0)
            leaves = tl.load(leaves_ptr + of_chunk * K + key, mask=key < K, other=0)
            left = state.to(v.dtype)
            u = tl.trans(v)
            if DELTA:
                known = tl.load(known_ptr + at, mask=live & in_k, other=0)
                solve = tl.trans(tl.load(solve_ptr + square))
                said = tl.dot(left, tl.trans(known), input_precision="ieee")
                moved = tl.dot(u, solve, input_precision="ieee")
                u = tl.dot((-said).to(v.dtype), solve, moved, input_precision="ieee").to(v.dtype)
            o = tl.dot(left, tl.trans(asked), input_precision="ieee")
            o = tl.dot(u, tl.trans(within), o, input_precision="ieee")
            state = tl.dot(u, told, state * leaves[None, :], input_precision="ieee")
            o_at = o_ptr + (token * H + head) * V + value[None, :]
            tl.store(o_at, tl.trans(o).to(o_ptr.dtype.element_ty), mask=live & in_v)
            chunk += 1
        block = tl.load(marked_ptr + row) if piece == 0 else tl.load(writes_ptr + row)
        if (piece == 1) | (mark > 0):
            tl.store(
                states_ptr + block * states_block + cell, tl.trans(state), mask=(key < K)[:, None] & in_v
            )  # fmt: skip


class Cut(NamedTuple):
    """The columns of a state that a program has, and its warps."""

    columns: int
    warps: int


def choose(rows: int, heads: int, values: int, multiprocessors: int) -> Cut:
    """Return the cut. With 64 columns a warpgroup has one tile of a Hopper GPU's products; where rows are many, two
    warpgroups share what they read."""
    if rows * heads * -(-values // 64) <= 2 * multiprocessors or values <= 64:
        return Cut(min(64, max(16, triton.next_power_of_2(values))), 4)
    return Cut(128, 8)


def _aot(delta: bool, columns: int, warps: int) -> AotKernel:
    constants = aot_constants(delta) | {"BV": columns, "L": CHUNK, "SHORT": 1, "STAGES": 2}
    common = aot_types(delta)
    for name in ("EACH", "beta_ptr", "log_rate_ptr", "dt_bias_ptr"):
        constants.pop(name, None)
    types = ROW_TYPES | {name: common[name] for name in ("v_ptr", "o_ptr", "states_ptr", "v_token", "states_block")}
    types |= dict.fromkeys(("asked_ptr", "told_ptr", "within_ptr"), "*bf16")
    types |= {"leaves_ptr": "*fp32", "of_ptr": "*i32"}
    if delta:
        types |= {"known_ptr": "*bf16", "solve_ptr": "*bf16"}
    else:
        constants |= {"known_ptr": None, "solve_ptr": None}
    return AotKernel(_linear_attention_chunks, types, constants, num_warps=warps, tensor_cores="MMA", archs=ONE_OF_EACH)


AOT = (_aot(True, 64, 4), _aot(False, 64, 4), _aot(True, 128, 8))
