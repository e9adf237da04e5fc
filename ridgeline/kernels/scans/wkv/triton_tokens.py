"""RWKV's weighted mean token by token: a program has some channels of a row, or of a chunk of it.

Legend: that of op.py, and
    C  chunks
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel

CHANNELS = (
    64  # of a program: half as many threads as the fewest that a GPU runs side by side, so that programs are many
)
WARPS = 2


@triton.jit
def joined(a, b, p, more_a, more_b, more_p):
    """Return the sum of two states; see op.py for the three numbers."""
    top = tl.maximum(p, more_p)
    old, new = tl.exp(p - top), tl.exp(more_p - top)
    return old * a + new * more_a, old * b + new * more_b, top


@triton.jit
def state_at(states_ptr, place, channel, X: tl.constexpr, mask, nothing):
    """Load a state of [3, X] numbers, and one in which no token is where the mask is False."""
    a = tl.load(states_ptr + place + channel, mask=mask, other=0)
    b = tl.load(states_ptr + place + X + channel, mask=mask, other=0)
    return a, b, tl.load(states_ptr + place + 2 * X + channel, mask=mask, other=nothing)


@triton.jit
def keep(states_ptr, place, channel, X: tl.constexpr, a, b, p):
    mask = channel < X
    tl.store(states_ptr + place + channel, a, mask=mask)
    tl.store(states_ptr + place + X + channel, b, mask=mask)
    tl.store(states_ptr + place + 2 * X + channel, p, mask=mask)


@triton.jit
def _through(
    k_ptr, v_ptr, o_ptr, decay_ptr, bonus_ptr, states_ptr, marked, mark, start, end, a, b, p, k_token, v_token,
    channel, X: tl.constexpr, SAYS: tl.constexpr, MARKS: tl.constexpr,
):  # fmt: skip
    """Return the state behind tokens `start` to `end` - 1. SAYS: store their outputs. MARKS: store the state at the
    mark."""
    inside = channel < X
    decay = tl.load(decay_ptr + channel, mask=inside, other=0)
    bonus = tl.load(bonus_ptr + channel, mask=inside, other=0)
    if start < end:
        k = tl.load(k_ptr + tl.cast(start, tl.int64) * k_token + channel, mask=inside, other=0)
        v = tl.load(v_ptr + tl.cast(start, tl.int64) * v_token + channel, mask=inside, other=0)
        for token in range(start, end):
            following = tl.cast(tl.minimum(token + 1, end - 1), tl.int64)  # asked for before this one is used
            next_k = tl.load(k_ptr + following * k_token + channel, mask=inside, other=0)
            next_v = tl.load(v_ptr + following * v_token + channel, mask=inside, other=0)
            wide_k, wide_v = k.to(tl.float32), v.to(tl.float32)
            one = wide_k * 0 + 1
            if SAYS:
                sum_a, sum_b, _ = joined(a, b, p, wide_v, one, wide_k + bonus)
                o_at = o_ptr + tl.cast(token, tl.int64) * X + channel
                tl.store(o_at, (sum_a / sum_b).to(o_ptr.dtype.element_ty), mask=inside)
            a, b, p = joined(a, b, p + decay, wide_v, one, wide_k)
            if MARKS:  # noqa: SIM102 (a constant decides whether there is a mark to load)
                if token + 1 - start == mark:
                    keep(states_ptr, marked, channel, X, a, b, p)
            k, v = next_k, next_v
    return a, b, p


@triton.jit
def _wkv_rows(
    k_ptr, v_ptr, decay_ptr, bonus_ptr, states_ptr, o_ptr,
    start_ptr, reads_ptr, writes_ptr, fresh_ptr, marks_ptr, marked_ptr,
    k_token, v_token, states_block, nothing,
    X: tl.constexpr, BX: tl.constexpr, LONGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run a row. LONGEST: rows of more tokens are left to others; 0: no row is."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, channel = tl.program_id(1), tl.program_id(0) * BX + tl.arange(0, BX)
    start, end = tl.load(start_ptr + row), tl.load(start_ptr + row + 1)
    if LONGEST > 0:
        end = tl.where(end - start <= LONGEST, end, start)
    if start < end:
        held = channel < X * (1 - tl.load(fresh_ptr + row).to(tl.int32))
        a, b, p = state_at(states_ptr, tl.load(reads_ptr + row) * states_block, channel, X, held, nothing)
        marked, mark = tl.load(marked_ptr + row) * states_block, tl.load(marks_ptr + row)
        a, b, p = _through(
            k_ptr, v_ptr, o_ptr, decay_ptr, bonus_ptr, states_ptr, marked, mark, start, end, a, b, p, k_token, v_token,
            channel, X, True, True,
        )  # fmt: skip
        keep(states_ptr, tl.load(writes_ptr + row) * states_block, channel, X, a, b, p)


@triton.jit
def _wkv_chunks(
    k_ptr, v_ptr, decay_ptr, bonus_ptr, chunks_ptr, o_ptr, start_ptr, first_ptr, length_ptr, row_ptr, k_token, v_token,
    nothing, X: tl.constexpr, BX: tl.constexpr, SAYS: tl.constexpr, LONGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run a chunk of a row of more than LONGEST tokens.

    chunks_ptr: float32 [C, 3, X]. SAYS: it holds the states before the chunks, and outputs are stored. Otherwise the
    states of the chunk's tokens alone are stored there.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, channel = tl.program_id(1), tl.program_id(0) * BX + tl.arange(0, BX)
    length = tl.load(length_ptr + chunk)
    if length == 0:
        return
    row = tl.load(row_ptr + chunk)
    if tl.load(start_ptr + row + 1) - tl.load(start_ptr + row) <= LONGEST:
        return
    first, place = tl.load(first_ptr + chunk), chunk.to(tl.int64) * 3 * X
    known = channel < (X if SAYS else 0)
    a, b, p = state_at(chunks_ptr, place, channel, X, known, nothing)
    a, b, p = _through(
        k_ptr, v_ptr, o_ptr, decay_ptr, bonus_ptr, chunks_ptr, 0, 0, first, first + length, a, b, p, k_token, v_token,
        channel, X, SAYS, False,
    )  # fmt: skip
    if not SAYS:
        keep(chunks_ptr, place, channel, X, a, b, p)


@triton.jit
def _wkv_carry(
    chunks_ptr, decay_ptr, states_ptr, start_ptr, reads_ptr, writes_ptr, fresh_ptr, marks_ptr, marked_ptr,
    length_ptr, of_ptr, states_block, nothing,
    X: tl.constexpr, BX: tl.constexpr, LONGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Replace the states of a row's chunks' tokens alone by the states before these chunks, and store those at the
    row's mark and end."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, channel = tl.program_id(1), tl.program_id(0) * BX + tl.arange(0, BX)
    if tl.load(start_ptr + row + 1) - tl.load(start_ptr + row) > LONGEST:
        decay = tl.load(decay_ptr + channel, mask=channel < X, other=0)
        held = channel < X * (1 - tl.load(fresh_ptr + row).to(tl.int32))
        a, b, p = state_at(states_ptr, tl.load(reads_ptr + row) * states_block, channel, X, held, nothing)
        mark, done = tl.load(marks_ptr + row), tl.load(start_ptr + row) * 0
        for chunk in range(tl.load(of_ptr + row), tl.load(of_ptr + row + 1)):
            place = tl.cast(chunk, tl.int64) * 3 * X
            more_a, more_b, more_p = state_at(chunks_ptr, place, channel, X, channel < X, nothing)
            keep(chunks_ptr, place, channel, X, a, b, p)
            length = tl.load(length_ptr + chunk)
            a, b, p = joined(a, b, p + decay * length.to(tl.float32), more_a, more_b, more_p)
            done += length
            if done == mark:
                keep(states_ptr, tl.load(marked_ptr + row) * states_block, channel, X, a, b, p)
        keep(states_ptr, tl.load(writes_ptr + row) * states_block, channel, X, a, b, p)


_TYPES = {
    **dict.fromkeys(("k_ptr", "v_ptr", "o_ptr"), "*bf16"),
    **dict.fromkeys(("decay_ptr", "bonus_ptr", "states_ptr", "chunks_ptr"), "*fp32"),
    **dict.fromkeys(("start_ptr", "marks_ptr", "first_ptr", "length_ptr", "row_ptr", "of_ptr"), "*i32"),
    **dict.fromkeys(("reads_ptr", "writes_ptr", "marked_ptr"), "*i64"),
    **dict.fromkeys(("k_token", "v_token", "states_block"), "i32:16"),
    "fresh_ptr": "*u8",
    "nothing": "fp32",
}


def _aot(kernel: object, **constants: object) -> AotKernel:
    names = kernel.arg_names  # type: ignore[attr-defined]
    types = {name: kind for name, kind in _TYPES.items() if name in names}
    return AotKernel(
        kernel, types, {"X": 4096, "BX": CHANNELS, **constants}, num_warps=WARPS, hot=True, archs=ONE_OF_EACH
    )


AOT = (
    _aot(_wkv_rows, LONGEST=0),
    _aot(_wkv_chunks, SAYS=True, LONGEST=16),
    _aot(_wkv_chunks, SAYS=False, LONGEST=16),
    _aot(_wkv_carry, LONGEST=16),
)
