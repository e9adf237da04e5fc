"""Mamba-2's recurrence in chunks, as products: the kernels before that of outputs. Five launches (prompts.py):

    decays    what is left of a state, and of each token of a chunk, at the chunk's other tokens
    segments  what each segment but a row's last adds to the state
    pass      the state at the end of each of those segments, in the order of a row
    products  C Bᵀ of each chunk (triton_products.py)
    outputs   outputs and states: a program walks through a segment with the state in registers (triton_products.py,
              hopper_outputs.py)

Within a chunk, with left[i, j] = step of token j, times how much of it is left at token i (0 if j > i), the outputs are

    y = (C Bᵀ ∘ left) x + left of the state ∘ (C Sᵀ),   and the state becomes   S ← left · S + (x ∘ weight)ᵀ B

with the last token's `left` as `weight`. Decays are differences of sums of logarithms that never leave a chunk, so no
row is too long for them. Rows of one token are not touched: `triton_walk.py` has them.

Legend: that of op.py, and
    C  chunks
    L  full segments of which no other begins in the same `segment` tokens of the step
    Q  tokens of a chunk
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.triton_math import softplus
from ridgeline.kernels.scans.metadata import CHUNK_TYPES, ROW_TYPES
from ridgeline.kernels.scans.ssd.choose import Cut

LOG2_E = 1.4426950408889634
# A token that leaves 2**-60 of a state or less leaves nothing. A larger logarithm would only cost the chunk's other
# decays bits, since they are differences of sums.
FORGOTTEN = -60.0
HEADS_AT_ONCE = 32  # of a program of `_decays`: a sector of memory for two of a token's


@triton.jit
def _decays(
    dt_ptr, rate_ptr, bias_ptr, log_ptr, shift_ptr, weight_ptr, first_ptr, length_ptr, row_ptr, start_ptr,
    dt_token, dt_min, dt_max,
    H: tl.constexpr, Q: tl.constexpr, BLOCK_H: tl.constexpr, LOG2_E: tl.constexpr, FORGOTTEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write, for a chunk, [H, Q] each:

    log: the binary logarithm of what is left, after a token, of the state before the chunk.
    shift: log less the logarithm of the token's step, so that left[i, j] = exp2(log[i] - shift[j]).
    weight: how much of a token is in the state after the chunk.

    Tokens behind the chunk's last have no step.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    rate = tl.load(rate_ptr + head, mask=head < H, other=0.0).to(tl.float32) * LOG2_E
    bias = tl.load(bias_ptr + head, mask=head < H, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    chunk = tl.program_id(0)
    length = tl.load(length_ptr + chunk)
    if length == 0:
        return
    row = tl.load(row_ptr + chunk)
    if tl.load(start_ptr + row + 1) - tl.load(start_ptr + row) == 1:
        return
    i = tl.arange(0, Q)
    exists = i < length
    token = tl.load(first_ptr + chunk).to(tl.int64) + i
    places = dt_ptr + token[:, None] * dt_token + head[None, :]
    dt = tl.load(places, mask=exists[:, None] & (head < H)[None, :], other=0.0).to(tl.float32)
    step = tl.minimum(tl.maximum(softplus(dt + bias[None, :]), dt_min), dt_max)
    step = tl.where(exists[:, None], step, 0.0)
    log = tl.maximum(step * rate[None, :], FORGOTTEN)
    total = tl.sum(log, 0)
    log = tl.cumsum(log, 0)
    weight = step * tl.exp2(tl.minimum(total[None, :] - log, 0.0))
    shift = log - tl.log2(step)
    place = (chunk.to(tl.int64) * H + head)[None, :] * Q + i[:, None]
    tl.store(log_ptr + place, log, mask=(head < H)[None, :])
    tl.store(shift_ptr + place, shift, mask=(head < H)[None, :])
    tl.store(weight_ptr + place, weight, mask=(head < H)[None, :])


@triton.jit
def _segment(first_ptr, length_ptr, row_ptr, start_ptr, index):
    """Return a segment's first token, its tokens and its row, and where the row begins and ends. There are no tokens if
    the row has only one, which another kernel runs."""
    length = tl.load(length_ptr + index)
    first = tl.load(first_ptr + index)
    row = tl.load(row_ptr + index)  # behind the last segment there is no such row
    begin = tl.load(start_ptr + row)
    end = tl.load(start_ptr + row + 1, mask=length > 0, other=0)
    length = tl.where(end - begin == 1, 0, length)
    return first, length, row, begin, end


@triton.jit
def _tile(pointer, offset, rows, columns, width: tl.constexpr, BLOCK: tl.constexpr):
    """Load the first `rows` rows, and `width` columns, of a tile of BLOCK columns. The rest is 0."""
    i = tl.arange(0, offset.shape[0])
    if width % BLOCK == 0:
        return tl.load(pointer + offset, mask=(i < rows)[:, None], other=0.0)
    return tl.load(pointer + offset, mask=(i < rows)[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def _advance(
    state, x_ptr, b_ptr, log_ptr, shift_ptr, first, length, chunk, head, p, s, share,
    X_TOKEN: tl.constexpr, BC_TOKEN: tl.constexpr,
    H: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
    Q: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Return (a state after `length` tokens, the binary logarithm of what is left of it then). The first token begins
    a chunk."""
    i = tl.arange(0, Q)
    x_ptr += head * P + first.to(tl.int64) * X_TOKEN
    b_ptr += head // share * S + first.to(tl.int64) * BC_TOKEN
    x_offset = i[:, None] * X_TOKEN + p[None, :]
    b_offset = i[:, None] * BC_TOKEN + s[None, :]
    scale = (chunk.to(tl.int64) * H + head) * Q
    left = 0.0
    for ahead in tl.range(0, length, Q, num_stages=STAGES):
        rows = length - ahead
        x = _tile(x_ptr, x_offset, rows, p, P, BLOCK_P)
        b = _tile(b_ptr, b_offset, rows, s, S, BLOCK_S)
        total = tl.load(log_ptr + scale + tl.minimum(rows, Q) - 1)
        weight = tl.where(i < rows, tl.exp2(total - tl.load(shift_ptr + scale + i)), 0.0)
        weighted = (x * weight[:, None]).to(x.dtype)
        state = tl.dot(tl.trans(weighted), b, acc=state * tl.exp2(total), input_precision=DOT)
        left += total
        x_ptr += Q * X_TOKEN
        b_ptr += Q * BC_TOKEN
        scale += H * Q
    return state, left


@triton.jit
def _segments(
    x_ptr, b_ptr, log_ptr, shift_ptr, sums_ptr, left_ptr,
    first_ptr, length_ptr, row_ptr, start_ptr, chunk_ptr, share,
    X_TOKEN: tl.constexpr, BC_TOKEN: tl.constexpr,
    H: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
    Q: tl.constexpr, SEGMENT: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write sums_LHPS, the state that a segment leaves if it begins with zeros, and left_LH, the binary logarithm of
    what it leaves of the state before it."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    parts: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    first, length, row, begin, end = _segment(first_ptr, length_ptr, row_ptr, start_ptr, tl.program_id(1))
    if (length == 0) | (first + length == end):
        return
    head, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    p = part * BLOCK_P + tl.arange(0, BLOCK_P)
    s = tl.arange(0, BLOCK_S)
    state, left = _advance(
        tl.zeros((BLOCK_P, BLOCK_S), tl.float32), x_ptr, b_ptr, log_ptr, shift_ptr, first, length,
        tl.load(chunk_ptr + row) + (first - begin) // Q, head, p, s, share, X_TOKEN, BC_TOKEN,
        H, P, S, BLOCK_P, BLOCK_S, Q, STAGES, DOT,
    )  # fmt: skip
    slot = (first // SEGMENT).to(tl.int64)
    place = (slot * H + head) * P * S + p[:, None] * S + s[None, :]
    tl.store(sums_ptr + place, state, mask=(p < P)[:, None] & (s < S)[None, :])
    if part == 0:
        tl.store(left_ptr + slot * H + head, left)


@triton.jit
def _pass(
    sums_ptr, before_ptr, left_ptr, states_ptr, start_ptr, reads_ptr, fresh_ptr, block_size,
    H: tl.constexpr, SIZE: tl.constexpr, SEGMENT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Turn sums_LHPS into the states at the segments' ends. Copy the states that rows of several segments begin with to
    before_LHPS, because the program of a row's last segment may replace them while that of its first one runs."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1)
    begin = tl.load(start_ptr + row)
    many = (tl.load(start_ptr + row + 1) - begin - 1) // SEGMENT
    if many <= 0:
        return
    parts: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    head = tl.program_id(0) // parts
    within = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    place = head * SIZE + within
    held = SIZE * (1 - tl.load(fresh_ptr + row).to(tl.int32))  # nothing of a fresh row's state is read
    state = tl.load(states_ptr + tl.load(reads_ptr + row) * block_size + place, mask=within < held, other=0.0)
    slot = (begin // SEGMENT).to(tl.int64)
    sums_ptrs = sums_ptr + slot * H * SIZE + place
    tl.store(before_ptr + slot * H * SIZE + place, state, mask=within < SIZE)
    left_ptr += slot * H + head
    for _ in range(many):
        added = tl.load(sums_ptrs, mask=within < SIZE, other=0.0)
        state = state * tl.exp2(tl.load(left_ptr)) + added
        tl.store(sums_ptrs, state, mask=within < SIZE)
        sums_ptrs += H * SIZE
        left_ptr += H


@triton.jit
def _before(
    states_ptr, before_ptr, sums_ptr, reads_ptr, fresh_ptr, block_size, row, first, begin, end, head, p, s,
    H: tl.constexpr, P: tl.constexpr, S: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Return the state of a head before a segment."""
    if end - begin <= SEGMENT:
        source = states_ptr + tl.load(reads_ptr + row) * block_size
    elif first == begin:
        source = before_ptr + (begin // SEGMENT).to(tl.int64) * H * P * S
    else:
        source = sums_ptr + (first // SEGMENT - 1).to(tl.int64) * H * P * S
    fresh = (end - begin <= SEGMENT).to(tl.int32) * tl.load(fresh_ptr + row).to(tl.int32)
    held = S * (1 - fresh)  # nothing of a fresh row's state is read
    place = head * P * S + p[:, None] * S + s[None, :]
    return tl.load(source + place, mask=(p < P)[:, None] & (s < held)[None, :], other=0.0)


@triton.jit
def _marks(
    x_ptr, b_ptr, log_ptr, shift_ptr, before_ptr, sums_ptr, states_ptr,
    start_ptr, chunk_ptr, reads_ptr, fresh_ptr, marks_ptr, marked_ptr, block_size, share,
    X_TOKEN: tl.constexpr, BC_TOKEN: tl.constexpr,
    H: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
    Q: tl.constexpr, SEGMENT: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the states at marks. This runs before the outputs, whose kernel may overwrite what rows begin with."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    parts: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    row = tl.program_id(1)
    mark = tl.load(marks_ptr + row)
    begin, end = tl.load(start_ptr + row), tl.load(start_ptr + row + 1)
    if (mark == 0) | (end - begin == 1):
        return
    head = tl.program_id(0) // parts
    p = tl.program_id(0) % parts * BLOCK_P + tl.arange(0, BLOCK_P)
    s = tl.arange(0, BLOCK_S)
    ahead = (mark - 1) // SEGMENT * SEGMENT
    state = _before(
        states_ptr, before_ptr, sums_ptr, reads_ptr, fresh_ptr, block_size, row, begin + ahead, begin, end, head, p, s,
        H, P, S, SEGMENT,
    )  # fmt: skip
    state, _ = _advance(
        state, x_ptr, b_ptr, log_ptr, shift_ptr, begin + ahead, mark - ahead, tl.load(chunk_ptr + row) + ahead // Q,
        head, p, s, share, X_TOKEN, BC_TOKEN, H, P, S, BLOCK_P, BLOCK_S, Q, STAGES, DOT,
    )  # fmt: skip
    place = tl.load(marked_ptr + row) * block_size + head * P * S + p[:, None] * S + s[None, :]
    tl.store(states_ptr + place, state, mask=(p < P)[:, None] & (s < S)[None, :])


def shape_constants(heads: int, width: int, size: int, dtype: torch.dtype, cut: Cut) -> dict[str, Any]:
    """Return the constants that `_segments` and the outputs' kernels share. Products of float32 are not rounded."""
    return {
        "H": heads, "P": width, "S": size,
        "BLOCK_P": max(16, triton.next_power_of_2(width)), "BLOCK_S": max(16, triton.next_power_of_2(size)),
        "Q": cut.chunk, "SEGMENT": cut.segment, "STAGES": cut.stages,
        "DOT": "ieee" if dtype == torch.float32 else "tf32",
    }  # fmt: skip


def aot_types(kernel: Any) -> dict[str, str]:
    """Return the types of a kernel's arguments in a model whose activations are bf16."""
    types = dict.fromkeys(kernel.arg_names, "i32:16") | {"share": "i32"}
    types |= {name: "*fp32" for name in kernel.arg_names if name.endswith("_ptr")}
    types |= dict.fromkeys(("x_ptr", "b_ptr", "c_ptr", "y_ptr", "dt_ptr"), "*bf16")
    return types | ROW_TYPES | CHUNK_TYPES | {"chunk_ptr": "*i32", "dt_min": "fp32", "dt_max": "fp32"}


def _aot(kernel: Any, cut: Cut, *, dot: bool = True, hot: bool = True) -> AotKernel:
    """Return an entry for Mamba-2's usual shape: 128 heads of 64 numbers, 128 of each in the state."""
    types = aot_types(kernel)
    constants = shape_constants(128, 64, 128, torch.bfloat16, cut)
    constants |= {"X_TOKEN": 8448, "BC_TOKEN": 8448}
    constants |= {
        "BLOCK_H": HEADS_AT_ONCE,
        "LOG2_E": LOG2_E,
        "FORGOTTEN": FORGOTTEN,
        "SIZE": 64 * 128,
        "BLOCK": 1024,
    }
    names = [name for name in kernel.arg_names if name != "PDL"]
    return AotKernel(
        kernel,
        {name: types[name] for name in names if name not in constants},
        {name: constants[name] for name in names if name in constants},
        num_warps=cut.warps, num_stages=cut.stages, hot=hot, tensor_cores="MMA" if dot else "", archs=ONE_OF_EACH,
    )  # fmt: skip


AOT = (
    _aot(_decays, Cut(), dot=False),
    _aot(_segments, Cut()),
    _aot(_marks, Cut()),
    _aot(_pass, Cut(), dot=False),
)
