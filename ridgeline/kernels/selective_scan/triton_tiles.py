"""The selective scan of long rows with each number computed once: by one warp for the channels of one row.

As in triton_walk.py, a program goes through a row's tokens with the states of some channels in registers. There a
channel's numbers are shared by LANES threads, and each of them computes the channel's step and gate. Here these are
computed in tiles of LANES tokens, one token a thread, and handed to the other threads of the channel; outputs go the
other way. What a token costs besides its exponentials is kept small: strides of tokens are constants, so an address is
an offset in the instruction, steps and gates take no quotient or logarithm, and tiles are asked for two blocks ahead.

A thread has four numbers of each of PARTS parts of a channel's state. Of 8,192 channels with 16 numbers each, a token
takes 11 to 12 instructions and 9.5 powers of 2 for eight numbers (docs/log.md, "scans, predicted").

Legend: that of op.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.launch import launch_options
from ridgeline.kernels.selective_scan.triton_walk import signature
from ridgeline.kernels.triton_math import quick_silu, smooth_step
from ridgeline.kernels.turns import Turns

LOG2_E = 1.4426950408889634
WORD = 8  # bytes of b or c that are loaded at once


@dataclass(frozen=True)
class Tiles:
    """The cut of the kernel: a channel's state lies in `lanes` threads, and a program asks for the states' directions
    of `tokens` tokens at once, a multiple of `lanes`. It is `warps` warps, which need not wait for one another."""

    lanes: int = 2
    tokens: int = 4
    warps: int = 1


@triton.jit
def _ask_tiles(
    x_ptrs, dt_ptrs, z_ptrs, limit, t,
    X_TOKEN: tl.constexpr, DT_TOKEN: tl.constexpr, Z_TOKEN: tl.constexpr, GATED: tl.constexpr, TILES: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Return (x, dt, z) of TILES tiles. Tokens from `limit` on are zeros."""
    asked = ()  # type: Any
    for g in tl.static_range(TILES):
        exists = t + g * LANES < limit
        x = tl.load(x_ptrs + g * LANES * X_TOKEN, mask=exists, other=0.0)
        dt = tl.load(dt_ptrs + g * LANES * DT_TOKEN, mask=exists, other=0.0)
        z = x
        if GATED:
            z = tl.load(z_ptrs + g * LANES * Z_TOKEN, mask=exists, other=0.0)
        asked = asked + (x, dt, z)  # noqa: RUF005 (the form that Triton knows)
    return asked


@triton.jit
def _ask_words(
    b_ptr, c_ptr, token, limit, w,
    B_WORDS: tl.constexpr, C_WORDS: tl.constexpr, WORDS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Return b and c of TOKENS tokens from `token` on, as words. Tokens from `limit` on are zeros."""
    b_words = b_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    c_words = c_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    asked = ()  # type: Any
    for j in tl.static_range(TOKENS):
        exists = w < tl.where(j < limit, WORDS, 0)
        b = tl.load(b_words + (token + j) * B_WORDS + w, mask=exists, other=0)
        c = tl.load(c_words + (token + j) * C_WORDS + w, mask=exists, other=0)
        asked = asked + (b, c)  # noqa: RUF005
    return asked


@triton.jit
def _number(words, part: tl.constexpr, TYPE: tl.constexpr):
    """Return number `part` of each word, in float32."""
    half = (words >> 32 * (part * 2 // (64 // TYPE.primitive_bitwidth))).to(tl.int32)
    if TYPE == tl.float32:
        return half.to(tl.float32, bitcast=True)
    elif TYPE == tl.bfloat16:
        return (half << 16 if part % 2 == 0 else half & -65536).to(tl.float32, bitcast=True)
    else:
        return (half >> 16 * (part % 2)).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)


@triton.jit
def _tiles(
    x_ptr, dt_ptr, rate_ptr, b_ptr, c_ptr, skip_ptr, bias_ptr, z_ptr, y_ptr, states_ptr,
    start_ptr, reads_ptr, writes_ptr, fresh_ptr, marks_ptr, marked_ptr, block_size,
    X_TOKEN: tl.constexpr, DT_TOKEN: tl.constexpr, B_TOKEN: tl.constexpr, C_TOKEN: tl.constexpr, Z_TOKEN: tl.constexpr,
    X: tl.constexpr, S: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_W: tl.constexpr, PARTS: tl.constexpr,
    LANES: tl.constexpr, TILES: tl.constexpr, LOG2_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run the tokens of row `program_id(1)` through BLOCK_X channels."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    TOKENS: tl.constexpr = LANES * TILES
    GATED: tl.constexpr = z_ptr is not None
    B_WORDS: tl.constexpr = B_TOKEN // PARTS
    C_WORDS: tl.constexpr = C_TOKEN // PARTS
    # Two neighbours change places: the compiler, which would spread a tile over the threads by how it lies in memory,
    # does not see that they are neighbours, so a channel's tokens are where the channel's states are.
    channel = tl.program_id(0) * BLOCK_X + (tl.arange(0, BLOCK_X) ^ 1)
    w, t = tl.arange(0, BLOCK_W), tl.arange(0, LANES)[None, :]
    in_x = channel < X
    place = channel[:, None] * S + (w * PARTS)[None, :]  # of the first number of each word
    inside = in_x[:, None] & (w * PARTS < S)[None, :]
    rates = ()  # type: Any
    for part in tl.static_range(PARTS):
        rate = tl.load(rate_ptr + place + part, mask=inside, other=0.0)
        rates = rates + (rate.to(tl.float32) * LOG2_E,)  # noqa: RUF005
    skip = tl.load(skip_ptr + channel, mask=in_x, other=0.0).to(tl.float32)[:, None]
    bias = tl.zeros((BLOCK_X, 1), tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=in_x, other=0.0).to(tl.float32)[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1)
    first = tl.load(start_ptr + row)
    length = tl.load(start_ptr + row + 1) - first
    if length <= 0:
        return
    mark = tl.load(marks_ptr + row)
    held = inside & (tl.load(fresh_ptr + row) == 0)  # nothing of a fresh row's state is read
    old = tl.load(reads_ptr + row) * block_size
    states = ()  # type: Any
    for part in tl.static_range(PARTS):
        state = tl.load(states_ptr + old + place + part, mask=held, other=0.0)
        states = states + (state,)  # noqa: RUF005
    done = mark * 0
    for span in range(2):  # to the mark, and from there on
        behind = tl.where(span == 0, mark, length)
        begin = (first + done).to(tl.int64)
        x_ptrs = x_ptr + (begin + t) * X_TOKEN + channel[:, None]
        dt_ptrs = dt_ptr + (begin + t) * DT_TOKEN + channel[:, None]
        y_ptrs = y_ptr + (begin + t) * X + channel[:, None]
        z_ptrs = x_ptrs
        if GATED:
            z_ptrs = z_ptr + (begin + t) * Z_TOKEN + channel[:, None]
        left = behind - done
        limit = tl.where(in_x, left, 0)[:, None]
        if X % BLOCK_X == 0:
            limit = tl.where(in_x, left, left)[:, None]
        now = _ask_tiles(x_ptrs, dt_ptrs, z_ptrs, limit, t, X_TOKEN, DT_TOKEN, Z_TOKEN, GATED, TILES, LANES)
        soon = _ask_tiles(
            x_ptrs + TOKENS * X_TOKEN, dt_ptrs + TOKENS * DT_TOKEN, z_ptrs + TOKENS * Z_TOKEN, limit - TOKENS, t,
            X_TOKEN, DT_TOKEN, Z_TOKEN, GATED, TILES, LANES,
        )  # fmt: skip
        words = _ask_words(b_ptr, c_ptr, begin, left, w, B_WORDS, C_WORDS, S // PARTS, TOKENS)
        for ahead in range(TOKENS, left + TOKENS, TOKENS):
            x_ptrs += TOKENS * X_TOKEN
            dt_ptrs += TOKENS * DT_TOKEN
            z_ptrs += TOKENS * Z_TOKEN
            later = _ask_tiles(
                x_ptrs + TOKENS * X_TOKEN, dt_ptrs + TOKENS * DT_TOKEN, z_ptrs + TOKENS * Z_TOKEN, limit - 2 * TOKENS,
                t, X_TOKEN, DT_TOKEN, Z_TOKEN, GATED, TILES, LANES,
            )  # fmt: skip
            next_words = _ask_words(
                b_ptr, c_ptr, begin + ahead, left - ahead, w, B_WORDS, C_WORDS, S // PARTS, TOKENS
            )  # fmt: skip
            for g in tl.static_range(TILES):
                live = t + g * LANES < limit
                x = now[3 * g].to(tl.float32)
                step = smooth_step(now[3 * g + 1].to(tl.float32) + bias)
                step = tl.where(live, step, 0.0)  # behind the end nothing changes
                added = step * x
                y = skip * x
                for lane in tl.static_range(LANES):
                    step_X1 = tl.sum(tl.where(t == lane, step, 0.0), 1)[:, None]
                    added_X1 = tl.sum(tl.where(t == lane, added, 0.0), 1)[:, None]
                    news = ()  # type: Any
                    outs = tl.zeros((BLOCK_X, BLOCK_W), tl.float32)
                    for part in tl.static_range(PARTS):
                        b = _number(words[2 * (g * LANES + lane)], part, b_ptr.dtype.element_ty)
                        c = _number(words[2 * (g * LANES + lane) + 1], part, c_ptr.dtype.element_ty)
                        state = states[part] * tl.exp2(step_X1 * rates[part]) + added_X1 * b[None, :]
                        outs += state * c[None, :]
                        news = news + (state,)  # noqa: RUF005
                    states = news
                    y += tl.where(t == lane, tl.sum(outs, 1)[:, None], 0.0)
                if GATED:
                    y *= quick_silu(now[3 * g + 2].to(tl.float32))
                tl.store(y_ptrs + g * LANES * X, y.to(y_ptr.dtype.element_ty), mask=live)
            y_ptrs += TOKENS * X
            limit -= TOKENS
            now, soon, words = soon, later, next_words
        if (span == 0) & (mark > 0):
            marked = tl.load(marked_ptr + row) * block_size
            for part in tl.static_range(PARTS):
                tl.store(states_ptr + marked + place + part, states[part], mask=inside)
        done = behind
    new = tl.load(writes_ptr + row) * block_size
    for part in tl.static_range(PARTS):
        tl.store(states_ptr + new + place + part, states[part], mask=inside)


def run(
    x_TX: Tensor,
    dt_TX: Tensor,
    rate_XS: Tensor,
    b_TS: Tensor,
    c_TS: Tensor,
    skip_X: Tensor,
    dt_bias_X: Tensor | None,
    z_TX: Tensor | None,
    states_NXS: Tensor,
    turns: Turns,
    y_TX: Tensor,
    cut: Tiles,
) -> None:
    """Write the outputs of all rows to `y_TX`, and replace their states."""
    channels, size = rate_XS.shape
    b_TS, c_TS = (aligned(x) for x in (b_TS, c_TS))
    strides = [0 if x is None else x.stride(0) for x in (x_TX, dt_TX, b_TS, c_TS, z_TX)]
    constants = shape_constants(channels, size, b_TS.itemsize, strides, cut)
    _tiles[(triton.cdiv(channels, constants["BLOCK_X"]), turns.num_rows)](
        x_TX, dt_TX, rate_XS, b_TS, c_TS, skip_X, dt_bias_X, z_TX, y_TX, states_NXS,
        turns.start_R1, turns.reads_R, turns.writes_R, turns.fresh_R.view(torch.uint8), turns.marks_R, turns.marked_R,
        states_NXS.stride(0), **constants, num_warps=cut.warps, **launch_options(x_TX.device),
    )  # fmt: skip


def fits(size: int, itemsize: int) -> bool:
    """Return True if states of so many numbers are whole words of b and c."""
    return size * itemsize % WORD == 0


def aligned(x_TS: Tensor) -> Tensor:
    """Return the tensor if its rows are words of memory, or a copy."""
    words = x_TS.data_ptr() % WORD == 0 and x_TS.stride(0) * x_TS.itemsize % WORD == 0
    return x_TS if words else x_TS.clone(memory_format=torch.contiguous_format)


def shape_constants(channels: int, size: int, itemsize: int, strides: list[int], cut: Tiles) -> dict[str, Any]:
    """Return the kernel's constants; `strides` are those of x, dt, b, c and z, and `itemsize` is that of b and c."""
    parts = WORD // itemsize
    names = ("X_TOKEN", "DT_TOKEN", "B_TOKEN", "C_TOKEN", "Z_TOKEN")
    return dict(zip(names, strides, strict=True)) | {
        "X": channels, "S": size, "BLOCK_X": 32 * cut.warps // cut.lanes,
        "BLOCK_W": max(cut.lanes, triton.next_power_of_2(size // parts)), "PARTS": parts,
        "LANES": cut.lanes, "TILES": cut.tokens // cut.lanes, "LOG2_E": LOG2_E,
    }  # fmt: skip


def _aot(cut: Tiles) -> AotKernel:
    """Return an entry for Falcon-Mamba-7B's shape."""
    constants = shape_constants(8192, 16, 2, [16_384, 8192, 288, 288, 16_384], cut)
    return AotKernel(
        _tiles, signature(_tiles, constants), constants, num_warps=cut.warps, hot=True, archs=ONE_OF_EACH
    )  # fmt: skip


AOT = (_aot(Tiles()), _aot(Tiles(4)), _aot(Tiles(1)), _aot(Tiles(2,8)), _aot(Tiles(4,8)))
