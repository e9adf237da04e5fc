"""The selective scan of long rows with nothing computed twice: a program is one warp, and has some channels of one row.

As in triton_walk.py, a program goes through a row's tokens with the states of its channels in registers. There each of
the threads that share a channel computes the channel's step and gate. Here these are computed in tiles of `lanes`
tokens, one token a thread, and handed to the other threads of the channel; outputs go the other way. What a token costs
besides its exponentials is kept small. Strides of tokens are constants, so an address is an offset in an instruction.
Steps and gates take neither quotients nor logarithms. b and c are loaded as words of four numbers, without masks where
a whole block of tokens exists. What comes from far memory is asked for two blocks ahead, and what all programs read,
which is near, one.

For eight numbers of a state a token takes 107 instructions, where triton_walk.py takes 207, and 9.5 operations of the
unit for exponentials, where it takes 12. The 8,192 channels of a row are 1,024 warps, two for each scheduler of an
H200.

Legend: that of op.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.base.triton_math import quick_silu, smooth_step
from ridgeline.kernels.scans.metadata import ScanMetadata
from ridgeline.kernels.scans.selective_scan.op import ScanInputs
from ridgeline.kernels.scans.selective_scan.triton_walk import arguments, signature, strides

LOG2_E = 1.4426950408889634
WORD = 8  # bytes of b or c that are loaded at once


@dataclass(frozen=True)
class Tiles:
    """The cut of the kernel: a channel's state lies in `lanes` threads (1, 2 or 4), and a program asks at once for what
    `tokens` tokens are made of, a multiple of `lanes`."""

    lanes: int = 4
    tokens: int = 8


@triton.jit
def _ask_tiles(
    x_ptrs, dt_ptrs, z_ptrs, limit, t,
    X_TOKEN: tl.constexpr, DT_TOKEN: tl.constexpr, Z_TOKEN: tl.constexpr, GATED: tl.constexpr, TILES: tl.constexpr,
    LANES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return (x, dt, z) of TILES tiles. Tokens from `limit` on are zeros; WHOLE: there are none."""
    other: tl.constexpr = None if WHOLE else 0.0
    asked = ()  # type: Any
    for g in tl.static_range(TILES):
        exists = None if WHOLE else t + g * LANES < limit
        x = tl.load(x_ptrs + g * LANES * X_TOKEN, mask=exists, other=other)
        dt = tl.load(dt_ptrs + g * LANES * DT_TOKEN, mask=exists, other=other)
        z = x
        if GATED:
            z = tl.load(z_ptrs + g * LANES * Z_TOKEN, mask=exists, other=other)
        asked = asked + (x, dt, z)  # noqa: RUF005 (the form that Triton knows)
    return asked


@triton.jit
def _ask_words(
    b_ptr, c_ptr, token, limit, t,
    B_WORDS: tl.constexpr, C_WORDS: tl.constexpr, WORDS: tl.constexpr, ROUNDS: tl.constexpr, TOKENS: tl.constexpr,
    LANES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return b and c of TOKENS tokens from `token` on, as words. Tokens from `limit` on are zeros; WHOLE: there are
    none, and no words that do not exist."""
    b_words = b_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    c_words = c_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    other: tl.constexpr = None if WHOLE else 0
    asked = ()  # type: Any
    for j in tl.static_range(TOKENS):
        for r in tl.static_range(ROUNDS):
            exists = None if WHOLE else t + r * LANES < tl.where(j < limit, WORDS, 0)
            b = tl.load(b_words + (token + j) * B_WORDS + (t + r * LANES), mask=exists, other=other)
            c = tl.load(c_words + (token + j) * C_WORDS + (t + r * LANES), mask=exists, other=other)
            asked = asked + (b, c)  # noqa: RUF005
    return asked


@triton.jit
def _number(words, part: tl.constexpr, kind: tl.constexpr):
    """Return number `part` of each word, in float32."""
    half = (words >> 32 * (part * 2 // (64 // kind.primitive_bitwidth))).to(tl.int32)
    if kind == tl.float32:
        return half.to(tl.float32, bitcast=True)
    elif kind == tl.bfloat16:
        return (half << 16 if part % 2 == 0 else half & -65536).to(tl.float32, bitcast=True)
    else:
        return (half >> 16 * (part % 2)).to(tl.int16).to(kind, bitcast=True).to(tl.float32)


@triton.jit
def _from(tile, thread, LANES: tl.constexpr):
    """Return the tile in which each thread has the value of thread[...]."""
    return tile if LANES == 1 else tl.gather(tile, thread, 0)


@triton.jit
def _sums(parts, thread, LANES: tl.constexpr):
    """Return the tile whose token j is the sum of parts[j] over the threads of a channel."""
    # Each thread keeps half of the tokens and gives away the other half, until it has the sum of one token
    t = thread % LANES
    if LANES == 1:
        return parts[0]
    elif LANES == 2:
        mine = tl.where(t == 0, parts[0], parts[1])
        return mine + _from(tl.where(t == 0, parts[1], parts[0]), thread ^ 1, LANES)
    else:
        low, even = t < 2, t % 2 == 0
        mine0, mine1 = tl.where(low, parts[0], parts[2]), tl.where(low, parts[1], parts[3])
        mine0 += _from(tl.where(low, parts[2], parts[0]), thread ^ 2, LANES)
        mine1 += _from(tl.where(low, parts[3], parts[1]), thread ^ 2, LANES)
        return tl.where(even, mine0, mine1) + _from(tl.where(even, mine1, mine0), thread ^ 1, LANES)


@triton.jit
def _tiles(
    x_ptr, dt_ptr, rate_ptr, b_ptr, c_ptr, skip_ptr, bias_ptr, z_ptr, y_ptr, states_ptr,
    start_ptr, reads_ptr, writes_ptr, fresh_ptr, marks_ptr, marked_ptr, block_size,
    X_TOKEN: tl.constexpr, DT_TOKEN: tl.constexpr, B_TOKEN: tl.constexpr, C_TOKEN: tl.constexpr, Z_TOKEN: tl.constexpr,
    X: tl.constexpr, S: tl.constexpr, THREADS: tl.constexpr, ROUNDS: tl.constexpr, EACH: tl.constexpr,
    LANES: tl.constexpr, TILES: tl.constexpr, LOG2_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run the tokens of row `program_id(1)` through the channels of a warp of THREADS. A word of b and c has EACH
    numbers, and a thread has ROUNDS words of its channel."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    TOKENS: tl.constexpr = LANES * TILES
    WORDS: tl.constexpr = S // EACH
    EVEN: tl.constexpr = X % (THREADS // LANES) == 0 and WORDS == LANES * ROUNDS
    GATED: tl.constexpr = z_ptr is not None
    TYPE: tl.constexpr = b_ptr.dtype.element_ty
    # Every tensor has one element for each thread, so that none has to change its place
    thread = tl.arange(0, THREADS)
    t = thread % LANES
    own = thread - t  # the first thread of this channel
    channel = tl.program_id(0) * (THREADS // LANES) + thread // LANES
    in_x = channel < X
    place = channel * S + t * EACH  # of the first number of each first word
    rates = ()  # type: Any
    for part in tl.static_range(ROUNDS * EACH):
        inside = in_x & (t + part // EACH * LANES < WORDS)
        rate = tl.load(
            rate_ptr + place + (part // EACH * LANES * EACH + part % EACH), mask=inside, other=0.0
        )  # fmt: skip
        rates = rates + (rate.to(tl.float32) * LOG2_E,)  # noqa: RUF005
    skip = tl.load(skip_ptr + channel, mask=in_x, other=0.0).to(tl.float32)
    bias = tl.zeros((THREADS,), tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=in_x, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1)
    first = tl.load(start_ptr + row)
    length = tl.load(start_ptr + row + 1) - first
    if length <= 1:  # triton_walk.py runs rows of one token
        return
    mark = tl.load(marks_ptr + row)
    held = WORDS * (1 - tl.load(fresh_ptr + row).to(tl.int32))  # nothing of a fresh row's state is read
    old = tl.load(reads_ptr + row) * block_size
    states = ()  # type: Any
    for part in tl.static_range(ROUNDS * EACH):
        inside = in_x & (t + part // EACH * LANES < held)
        state = tl.load(
            states_ptr + old + place + (part // EACH * LANES * EACH + part % EACH), mask=inside, other=0.0
        )  # fmt: skip
        states = states + (state,)  # noqa: RUF005
    done = mark * 0
    for span in range(2):  # to the mark, and from there on
        behind = tl.where(span == 0, mark, length)
        begin = (first + done).to(tl.int64)
        x_ptrs = x_ptr + (begin + t) * X_TOKEN + channel
        dt_ptrs = dt_ptr + (begin + t) * DT_TOKEN + channel
        y_ptrs = y_ptr + (begin + t) * X + channel
        z_ptrs = x_ptrs
        if GATED:
            z_ptrs = z_ptr + (begin + t) * Z_TOKEN + channel
        left = behind - done
        limit = tl.where(in_x, left, 0)
        now = _ask_tiles(x_ptrs, dt_ptrs, z_ptrs, limit, t, X_TOKEN, DT_TOKEN, Z_TOKEN, GATED, TILES, LANES, False)
        x_ptrs += TOKENS * X_TOKEN
        dt_ptrs += TOKENS * DT_TOKEN
        z_ptrs += TOKENS * Z_TOKEN
        soon = _ask_tiles(
            x_ptrs, dt_ptrs, z_ptrs, limit - TOKENS, t, X_TOKEN, DT_TOKEN, Z_TOKEN, GATED, TILES, LANES, False
        )  # fmt: skip
        words = _ask_words(
            b_ptr, c_ptr, begin, left, t, B_TOKEN // EACH, C_TOKEN // EACH, WORDS, ROUNDS, TOKENS, LANES, False
        )  # fmt: skip
        for ahead in range(TOKENS, left + TOKENS, TOKENS):
            x_ptrs += TOKENS * X_TOKEN
            dt_ptrs += TOKENS * DT_TOKEN
            z_ptrs += TOKENS * Z_TOKEN
            if EVEN and left - ahead >= 2 * TOKENS:
                later = _ask_tiles(
                    x_ptrs, dt_ptrs, z_ptrs, limit, t, X_TOKEN, DT_TOKEN, Z_TOKEN, GATED, TILES, LANES, True
                )  # fmt: skip
                next_words = _ask_words(
                    b_ptr, c_ptr, begin + ahead, left, t,
                    B_TOKEN // EACH, C_TOKEN // EACH, WORDS, ROUNDS, TOKENS, LANES, True,
                )  # fmt: skip
            else:
                later = _ask_tiles(
                    x_ptrs, dt_ptrs, z_ptrs, limit - ahead - TOKENS, t,
                    X_TOKEN, DT_TOKEN, Z_TOKEN, GATED, TILES, LANES, False,
                )  # fmt: skip
                next_words = _ask_words(
                    b_ptr, c_ptr, begin + ahead, left - ahead, t,
                    B_TOKEN // EACH, C_TOKEN // EACH, WORDS, ROUNDS, TOKENS, LANES, False,
                )  # fmt: skip
            for g in tl.static_range(TILES):
                live = t + g * LANES < limit - (ahead - TOKENS)
                x = now[3 * g].to(tl.float32)
                step = smooth_step(now[3 * g + 1].to(tl.float32) + bias)
                step = tl.where(live, step, 0.0)  # behind the end nothing changes
                added = step * x
                outs = ()  # type: Any
                for lane in tl.static_range(LANES):
                    of_step, of_added = _from(step, own + lane, LANES), _from(added, own + lane, LANES)
                    news = ()  # type: Any
                    out = tl.zeros((THREADS,), tl.float32)
                    for part in tl.static_range(ROUNDS * EACH):
                        b = _number(words[2 * ((g * LANES + lane) * ROUNDS + part // EACH)], part % EACH, TYPE)
                        c = _number(words[2 * ((g * LANES + lane) * ROUNDS + part // EACH) + 1], part % EACH, TYPE)
                        state = states[part] * tl.exp2(of_step * rates[part]) + of_added * b
                        out += state * c
                        news = news + (state,)  # noqa: RUF005
                    states = news
                    outs = outs + (out,)  # noqa: RUF005
                y = skip * x + _sums(outs, thread, LANES)
                if GATED:
                    y *= quick_silu(now[3 * g + 2].to(tl.float32))
                tl.store(y_ptrs + g * LANES * X, y.to(y_ptr.dtype.element_ty), mask=live)
            y_ptrs += TOKENS * X
            now, soon, words = soon, later, next_words
        if (span == 0) & (mark > 0):
            marked = tl.load(marked_ptr + row) * block_size
            for part in tl.static_range(ROUNDS * EACH):
                inside = in_x & (t + part // EACH * LANES < WORDS)
                at_mark = states_ptr + marked + place + (part // EACH * LANES * EACH + part % EACH)
                tl.store(at_mark, states[part], mask=inside)
        done = behind
    new = tl.load(writes_ptr + row) * block_size
    for part in tl.static_range(ROUNDS * EACH):
        inside = in_x & (t + part // EACH * LANES < WORDS)
        tl.store(states_ptr + new + place + (part // EACH * LANES * EACH + part % EACH), states[part], mask=inside)


def tiles(given: ScanInputs, states_NXS: Tensor, metadata: ScanMetadata, y_TX: Tensor, cut: Tiles) -> None:
    """Write the outputs of all rows of more than one token to `y_TX`, and replace their states."""
    channels, size = given.rate_XS.shape
    given = replace(given, b_TS=aligned(given.b_TS), c_TS=aligned(given.c_TS))
    threads = 32 if torch.version.hip is None else 64  # of a warp
    constants = shape_constants(channels, size, given.b_TS.itemsize, strides(given), cut, threads)
    _tiles[(triton.cdiv(channels, threads // cut.lanes), metadata.num_rows)](
        *arguments(given, y_TX, states_NXS, metadata), states_NXS.stride(0),
        **constants, num_warps=1, **launch_options(y_TX.device),
    )  # fmt: skip


def fits(size: int, itemsize: int) -> bool:
    """Return True if states of so many numbers are whole words of b and c."""
    return size * itemsize % WORD == 0


def aligned(x_TS: Tensor) -> Tensor:
    """Return the tensor if its rows are words of memory, or a copy."""
    words = x_TS.data_ptr() % WORD == 0 and x_TS.stride(0) * x_TS.itemsize % WORD == 0
    return x_TS if words else x_TS.clone(memory_format=torch.contiguous_format)


def shape_constants(
    channels: int, size: int, itemsize: int, of_tokens: list[int], cut: Tiles, threads: int = 32
) -> dict[str, Any]:
    """Return the kernel's constants. of_tokens: the strides of x, dt, b, c and z. itemsize: that of b and c."""
    each = WORD // itemsize
    names = ("X_TOKEN", "DT_TOKEN", "B_TOKEN", "C_TOKEN", "Z_TOKEN")
    return dict(zip(names, of_tokens, strict=True)) | {
        "X": channels, "S": size, "THREADS": threads,
        "ROUNDS": triton.cdiv(size // each, cut.lanes), "EACH": each,
        "LANES": cut.lanes, "TILES": cut.tokens // cut.lanes, "LOG2_E": LOG2_E,
    }  # fmt: skip


def _aot(cut: Tiles) -> AotKernel:
    """Return an entry for Falcon-Mamba-7B's shape."""
    constants = shape_constants(8192, 16, 2, [16_384, 8192, 288, 288, 16_384], cut)
    return AotKernel(
        _tiles, signature(_tiles, constants), constants, num_warps=1, hot=True, archs=ONE_OF_EACH
    )  # fmt: skip


AOT = (_aot(Tiles()),)
