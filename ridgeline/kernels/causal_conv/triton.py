"""The convolution in one launch: a program computes some channels of one chunk of a row.

The program of a row's first chunk alone reads the row's tail, and then replaces it, so no program reads a tail that
another one writes. A token's inputs are added up from the oldest on, whether they lie in the tail or in the step, so no
bit of a result depends on how the row was cut into steps.

Legend: that of op.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.causal_conv.op import activation_of
from ridgeline.kernels.launch import launch_options
from ridgeline.kernels.turns import Turns

CHUNK = 64  # as in gated_delta, so that a step's rows are cut once


@triton.jit
def _causal_conv(
    x_ptr, weight_ptr, bias_ptr, tails_ptr, y_ptr, start_ptr, reads_ptr, writes_ptr, fresh_ptr, marks_ptr, marked_ptr,
    first_ptr, length_ptr, row_ptr, x_token, tails_block,
    X: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, TAIL: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK channels of a chunk of at most TOKENS tokens. With TOKENS = 1 every row has one token, and row r is
    chunk r. TAIL: a power of two that is at least W - 1."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    before: tl.constexpr = W - 1
    chunk = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    in_x = channel < X
    if TOKENS == 1:
        row, first, length, start, end = chunk, chunk, 1, chunk, chunk + 1
    else:
        length = tl.load(length_ptr + chunk)
        if length == 0:
            return
        row = tl.load(row_ptr + chunk)
        first = tl.load(first_ptr + chunk)
        start, end = tl.load(start_ptr + row), tl.load(start_ptr + row + 1)
    read_ptr = tails_ptr + tl.load(reads_ptr + row) * tails_block + channel
    kept = before * (1 - tl.load(fresh_ptr + row).to(tl.int32))  # how much of a tail there is
    place = tl.arange(0, TOKENS)[:, None]
    token = first + place
    live = in_x & (place < length)
    sums = tl.zeros((TOKENS, BLOCK), tl.float32)
    if BIAS:
        sums += tl.load(bias_ptr + channel, mask=in_x, other=0).to(tl.float32)
    if first == start:
        for i in tl.static_range(before):
            from_tail = live & (place + i < kept)
            weight = tl.load(weight_ptr + channel * W + i, mask=in_x, other=0).to(tl.float32)
            sums += weight * tl.load(read_ptr + (place + i) * X, mask=from_tail, other=0).to(tl.float32)
    for i in tl.static_range(W):
        source = token - before + i
        weight = tl.load(weight_ptr + channel * W + i, mask=in_x, other=0).to(tl.float32)
        x = tl.load(x_ptr + source.to(tl.int64) * x_token + channel, mask=live & (source >= start), other=0)
        sums += weight * x.to(tl.float32)
    if SILU:
        sums = sums / (1 + tl.exp(-sums))
    tl.store(y_ptr + token.to(tl.int64) * X + channel, sums.to(y_ptr.dtype.element_ty), mask=live)
    if first == start:
        j = tl.arange(0, TAIL)[:, None]
        mark = tl.load(marks_ptr + row)
        stored = in_x & (j < before)
        to_ptr = tails_ptr + j * X + channel
        if mark > 0:
            tail = _tail(x_ptr, read_ptr, x_token, start, mark, channel, stored, kept, j, X, before)
            tl.store(to_ptr + tl.load(marked_ptr + row) * tails_block, tail, mask=stored)
        tail = _tail(x_ptr, read_ptr, x_token, start, end - start, channel, stored, kept, j, X, before)
        tl.debug_barrier()  # all threads have read the old tail
        tl.store(to_ptr + tl.load(writes_ptr + row) * tails_block, tail, mask=stored)


@triton.jit
def _tail(x_ptr, read_ptr, x_token, start, count, channel, wanted, kept, j, X: tl.constexpr, before: tl.constexpr):
    """Return the tail after the row's first `count` tokens."""
    source = count - before + j  # of the row's own tokens
    x = tl.load(x_ptr + (start + source).to(tl.int64) * x_token + channel, mask=wanted & (source >= 0), other=0)
    old = tl.load(read_ptr + (count + j) * X, mask=wanted & (count + j < kept), other=0)
    return tl.where(source >= 0, x, old)


class Cut(NamedTuple):
    """The channels of a program, and its warps."""

    block: int
    warps: int


def choose(channels: int, single: bool) -> Cut:
    """Return the cut. A thread has 16 bytes of a row in either case."""
    if single:
        return Cut(min(1024, triton.next_power_of_2(channels)), 4)
    return Cut(min(128, triton.next_power_of_2(channels)), 8)


def causal_conv(
    x_TX: Tensor,
    weight_XW: Tensor,
    bias_X: Tensor | None,
    tails_NwX: Tensor,
    turns: Turns,
    activation: str | None,
    cut: Cut | None = None,
) -> Tensor:
    activation_of(activation)
    channels, width = weight_XW.shape
    single = turns.tokens_each == 1
    chunks = None if single else turns.chunks(CHUNK, at_marks=False)  # no state within a row is one of a chunk's
    first_C, length_C, row_C = (None, None, None) if chunks is None else (chunks.first_C, chunks.length_C, chunks.row_C)
    number = turns.num_rows if first_C is None else len(first_C)
    cut = cut or choose(channels, single)
    y_TX = torch.empty(x_TX.shape, dtype=x_TX.dtype, device=x_TX.device)
    _causal_conv[(number, triton.cdiv(channels, cut.block))](
        x_TX, weight_XW, bias_X, tails_NwX, y_TX, turns.start_R1, turns.reads_R, turns.writes_R,
        turns.fresh_R.view(torch.uint8), turns.marks_R, turns.marked_R, first_C, length_C, row_C,
        x_TX.stride(0), tails_NwX.stride(0),
        X=channels, W=width, BLOCK=cut.block, TOKENS=1 if single else CHUNK, TAIL=triton.next_power_of_2(width - 1),
        BIAS=bias_X is not None, SILU=activation == "silu", num_warps=cut.warps, **launch_options(x_TX.device),
    )  # fmt: skip
    return y_TX


def _aot(single: bool) -> AotKernel:
    types = dict.fromkeys(("x_ptr", "weight_ptr", "tails_ptr", "y_ptr"), "*bf16")
    types |= dict.fromkeys(("start_ptr", "marks_ptr"), "*i32")
    types |= dict.fromkeys(("reads_ptr", "writes_ptr", "marked_ptr"), "*i64") | {"fresh_ptr": "*u8"}
    types |= {} if single else dict.fromkeys(("first_ptr", "length_ptr", "row_ptr"), "*i32")
    types |= {"x_token": "i32:16", "tails_block": "i32:16"}
    cut = choose(8192, single)
    constants: dict[str, Any] = {"X": 8192, "W": 4, "BLOCK": cut.block, "TOKENS": 1 if single else CHUNK, "TAIL": 4}
    absent = ("bias_ptr", *(("first_ptr", "length_ptr", "row_ptr") if single else ()))
    constants |= {"BIAS": False, "SILU": True} | dict.fromkeys(absent)
    return AotKernel(_causal_conv, types, constants, num_warps=cut.warps, hot=True, archs=ONE_OF_EACH)


AOT = (_aot(single=True), _aot(single=False))
