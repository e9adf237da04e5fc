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

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.scans.causal_conv.op import ConvInputs, activation_of
from ridgeline.kernels.scans.metadata import CHUNK_TYPES, ROW_TYPES, ScanMetadata

CHUNK = 32  # tokens; a chunk reads up to W - 1 more


@triton.jit
def _causal_conv(
    x_ptr, weight_ptr, bias_ptr, tails_ptr, y_ptr, start_ptr, reads_ptr, writes_ptr, fresh_ptr, marks_ptr, marked_ptr,
    first_ptr, length_ptr, row_ptr, x_token, tails_block,
    X: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, WIDTH: tl.constexpr,
    TAIL: tl.constexpr,
    SINGLE: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK channels of a chunk, token by token. SINGLE: every row has one token, and row r is chunk r. AHEAD:
    the tokens that are asked for at once. WIDTH, TAIL: powers of two that are at least W and W - 1."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    before: tl.constexpr = W - 1
    chunk = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_x = channel < X
    if SINGLE:
        row, first, start, end = chunk, chunk, chunk, chunk + 1
        length = end - start
    else:
        length = tl.load(length_ptr + chunk)
        if length == 0:
            return
        row = tl.load(row_ptr + chunk)
        first = tl.load(first_ptr + chunk)
        start, end = tl.load(start_ptr + row), tl.load(start_ptr + row + 1)
    read_ptr = tails_ptr + tl.load(reads_ptr + row) * tails_block + channel
    kept = before * (1 - tl.load(fresh_ptr + row).to(tl.int32))  # how much of a tail there is
    weights = ()  # type: Any
    held = ()  # type: Any  # the inputs in front of a token, oldest first
    of_weight = tl.arange(0, WIDTH)[None, :]
    in_weights = in_x[:, None] & (of_weight < W)
    together = tl.load(weight_ptr + channel[:, None] * W + of_weight, mask=in_weights, other=0)  # in wide loads
    for i in tl.static_range(W):
        weight = tl.sum(tl.where(of_weight == i, together, 0).to(tl.float32), 1)
        weights = weights + (weight,)  # noqa: RUF005 (the form that Triton knows)
    source_ptr = x_ptr + tl.cast(first, tl.int64) * x_token + channel
    for i in tl.static_range(before):
        place = channel * 0 + (first - start - before + i)  # among the row's own tokens; its tail is in front of them
        old = tl.load(read_ptr + (place + before) * X, mask=in_x & (place < 0) & (place + before < kept), other=0)
        x = tl.load(source_ptr + (i - before) * x_token, mask=in_x & (place >= 0), other=0)
        input = tl.where(place < 0, old.to(tl.float32), x.to(tl.float32))
        held = held + (input,)  # noqa: RUF005
    begun = tl.zeros((BLOCK,), tl.float32)
    if BIAS:
        begun += tl.load(bias_ptr + channel, mask=in_x, other=0).to(tl.float32)
    target_ptr = y_ptr + tl.cast(first, tl.int64) * X + channel
    behind = tl.where(in_x, length, 0)
    for begin in range(0, length, AHEAD):
        asked = ()  # type: Any
        for j in tl.static_range(AHEAD):
            taken = tl.load(source_ptr + (begin + j) * x_token, mask=begin + j < behind, other=0)
            asked = asked + (taken,)  # noqa: RUF005
        for j in tl.static_range(AHEAD):
            held = held + (asked[j].to(tl.float32),)  # noqa: RUF005
            sums = begun
            for i in tl.static_range(W):
                sums += weights[i] * held[i]
            if SILU:
                sums = sums / (1 + tl.exp(-sums))
            tl.store(target_ptr + (begin + j) * X, sums.to(y_ptr.dtype.element_ty), mask=begin + j < behind)
            held = held[1:]
    if first == start:
        j, columns, from_ptr = tl.arange(0, TAIL)[:, None], channel[None, :], read_ptr[None, :]
        mark = tl.load(marks_ptr + row)
        stored = in_x[None, :] & (j < before)
        to_ptr = tails_ptr + j * X + columns
        if mark > 0:
            tail = _tail(x_ptr, from_ptr, x_token, start, mark, columns, stored, kept, j, X, before)
            tl.store(to_ptr + tl.load(marked_ptr + row) * tails_block, tail, mask=stored)
        tail = _tail(x_ptr, from_ptr, x_token, start, end - start, columns, stored, kept, j, X, before)
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
    """The channels of a program, its warps, the most tokens of a chunk, and those that it asks for at once."""

    block: int
    warps: int
    tokens: int = 1
    ahead: int = 1


def choose(channels: int, single: bool) -> Cut:
    """Return the cut. A thread has 16 bytes of a token in either case."""
    block = min(1024, triton.next_power_of_2(channels))
    return Cut(block, 4) if single else Cut(block, 4, CHUNK, 8)


def causal_conv(given: ConvInputs, tails_NwX: Tensor, metadata: ScanMetadata, cut: Cut | None = None) -> Tensor:
    activation_of(given.activation)
    x_TX, (channels, width) = given.x_TX, given.weight_XW.shape
    single = metadata.tokens_each == 1
    cut = cut or choose(channels, single)
    chunks = (
        None if single else metadata.chunks(cut.tokens, at_marks=False)
    )  # no state within a row is one of a chunk's
    table = (None, None, None) if chunks is None else chunks.of_chunks
    number = metadata.num_rows if chunks is None else len(chunks.first_C)
    y_TX = torch.empty(x_TX.shape, dtype=x_TX.dtype, device=x_TX.device)
    _causal_conv[(number, triton.cdiv(channels, cut.block))](
        x_TX, given.weight_XW, given.bias_X, tails_NwX, y_TX, *metadata.of_rows, *table,
        x_TX.stride(0), tails_NwX.stride(0),
        X=channels, W=width, BLOCK=cut.block, AHEAD=cut.ahead, WIDTH=triton.next_power_of_2(width),
        TAIL=triton.next_power_of_2(width - 1),
        SINGLE=single, BIAS=given.bias_X is not None, SILU=given.activation == "silu", num_warps=cut.warps,
        **launch_options(x_TX.device),
    )  # fmt: skip
    return y_TX


def _aot(single: bool) -> AotKernel:
    types = dict.fromkeys(("x_ptr", "weight_ptr", "tails_ptr", "y_ptr"), "*bf16")
    types |= ROW_TYPES | ({} if single else CHUNK_TYPES)
    types |= {"x_token": "i32:16", "tails_block": "i32:16"}
    cut = choose(8192, single)
    constants: dict[str, Any] = {"X": 8192, "W": 4, "BLOCK": cut.block, "AHEAD": cut.ahead, "WIDTH": 4, "TAIL": 4}
    absent = ("bias_ptr", *(CHUNK_TYPES if single else ()))
    constants |= {"SINGLE": single, "BIAS": False, "SILU": True} | dict.fromkeys(absent)
    return AotKernel(_causal_conv, types, constants, num_warps=cut.warps, hot=True, archs=ONE_OF_EACH)


AOT = (_aot(single=True), _aot(single=False))
