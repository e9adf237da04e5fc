"""The gated delta rule over the chunks of long rows, for Hopper: a copy engine, and warpgroups that run independently.

As in triton_chunks.py, a warpgroup has 64 columns of a head's state in registers, as [columns, keys], and goes through
chunks in order. It starts a product before it needs the one in front. One warp asks the copy engine for the chunks, and
a second warpgroup may work on the next 64 columns with the same keys, queries and squares: while one scales numbers,
the matrix units compute the other's products. The state's prediction is subtracted from the values before they are
multiplied, so a chunk has 1,024 cycles of products for 64 columns. Outputs are written during the next chunk's first
product.

The engine copies whole boxes of tokens. Where a row, or its part in front of a mark, ends within a box, the warp that
asked puts zeros in place of the tokens of others.

A program runs a row, a part of one (plan.py), or a segment of one (segments.py).

Legend: that of triton_prepare.py, and
    D  segments
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.hopper.gluon_names import barrier, barriers, load_tile
from ridgeline.kernels.scans.gated_delta.hopper_states import (
    CARRIES,
    OUTPUTS,
    ROWS,
    leave,
    piece_of,
    span_of,
    state_before,
)
from ridgeline.kernels.scans.gated_delta.triton_prepare import CHUNK
from ridgeline.kernels.scans.metadata import CHUNK_TYPES, ROW_TYPES

COLUMNS = 64  # of a state, that a warpgroup has
REGISTERS = 160  # of a thread on average, with one warpgroup: so there is room for a program that prepares chunks

_CARRIES = gl.constexpr(CARRIES)
_C = gl.constexpr(COLUMNS)


def boxes(x_TX: Tensor, columns: int) -> TensorDescriptor:
    """Return the descriptor by which the copy engine reads boxes of a chunk's tokens: [CHUNK, columns]. Lines that do
    not begin at multiples of 16 bytes are copied first.
    """
    if x_TX.data_ptr() % 16 or x_TX.stride(0) * x_TX.itemsize % 16:
        x_TX = x_TX.clone(memory_format=torch.contiguous_format)
    return TensorDescriptor(x_TX, list(x_TX.shape), list(x_TX.stride()), [CHUNK, columns], _layout())


@cache
def _layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def _without(tile, length, LINES: gl.constexpr, X: gl.constexpr):
    """Put zeros into a tile's lines from `length` on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // X, X // 8], [1, 1], [1, 0])
    line = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, layout)), 1)
    for part in gl.static_range(LINES // 8):
        if part * 8 + 8 > length:
            lines = tile.slice(part * 8, 8, 0)
            x = lines.load(layout)
            lines.store(gl.where(line + part * 8 < length, x, gl.zeros([8, X], tile.dtype, layout)))


@gluon.jit
def _ask(
    begin, here, bar, tiles, descs, places, num_tokens, in_values,
    K: gl.constexpr, L: gl.constexpr, WIDE: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Ask for a chunk's tiles."""
    k, q, v, solve, within, _ = tiles
    k_desc, q_desc, v_desc, solve_desc, within_desc = descs
    key_column, value_column, line = places
    ALWAYS: gl.constexpr = L * (K + L) * (4 if OUT else 2)
    if in_values:
        mbarrier.expect(bar, ALWAYS + L * _C * WIDE * 2)
        for part in gl.static_range(WIDE):
            load_tile(v_desc, [begin, value_column + part * _C], bar, v.index(here * WIDE + part))
    else:
        mbarrier.expect(bar, ALWAYS)
    load_tile(k_desc, [begin, key_column], bar, k.index(here))
    load_tile(solve_desc, [line + begin, 0], bar, solve.index(here))
    if OUT:
        load_tile(q_desc, [begin, key_column], bar, q.index(here))
        load_tile(within_desc, [line + begin, 0], bar, within.index(here))


@gluon.jit
def _fill(
    span, tiles, full, empty, descs, places, factors_ptr, num_tokens, in_values,
    K: gl.constexpr, L: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Fill the ring with chunks. The last of the barriers that tell of it is for chunks that are not whole."""
    k, _, v, solve, _, factors = tiles
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    i = gl.arange(0, L, layout)
    step = span[0] * 0
    cut = span[0] * 0  # chunks that were not whole
    for piece in range(2):
        first, behind = piece_of(span, piece)
        for begin in range(first, behind, L):
            here = step % STAGES
            whole = begin + L <= behind
            live = begin + i < behind
            of_x = gl.load(factors_ptr + (begin + i), mask=live, other=0.0)
            of_o = gl.load(factors_ptr + num_tokens + (begin + i), mask=live, other=0.0)
            of_state = gl.load(factors_ptr + 2 * num_tokens + (begin + i), mask=live, other=0.0)
            mbarrier.wait(empty.index(here), ((step // STAGES) & 1) ^ 1)
            factors.index(here * 3).store(of_x)
            factors.index(here * 3 + 1).store(of_o)
            factors.index(here * 3 + 2).store(of_state)
            barrier()
            bar = full.index(gl.where(whole, here, STAGES))
            _ask(begin, here, bar, tiles, descs, places, num_tokens, in_values, K, L, WIDE, OUT)
            if begin + L > behind:
                mbarrier.wait(full.index(STAGES), cut & 1)
                _without(k.index(here), behind - begin, L, K)
                _without(solve.index(here), behind - begin, L, L)
                for part in gl.static_range(WIDE):
                    _without(v.index(here * WIDE + part), behind - begin, L, _C)
                fence_async_shared()
                barrier()
                mbarrier.arrive(full.index(here), count=1)
                cut += 1
            step += 1


@gluon.jit
def _put(o, tile, o_ptr, begin, behind, G: gl.constexpr, V: gl.constexpr, L: gl.constexpr):
    """Write a chunk's outputs, [columns, tokens]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // _C, _C // 8], [4, 1], [1, 0])
    i = gl.expand_dims(gl.arange(0, L, gl.SliceLayout(1, layout)), 1)
    column = gl.expand_dims(gl.arange(0, _C, gl.SliceLayout(0, layout)), 0)
    tile.permute((1, 0)).store(o)
    barrier()
    y = tile.load(layout)
    live = (begin + i < behind) & (column >= 0)
    gl.store(o_ptr + begin.to(gl.int64) * (G * V) + (i * (G * V) + column), y, mask=live)


@gluon.jit
def _run(
    piece, span, step, state, o, last, tiles, bars, decay_ptr, o_ptr, in_values, WHICH: gl.constexpr,
    G: gl.constexpr, V: gl.constexpr, L: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Run a piece of the row. Return the state after it, the next chunk's number, and the last chunk's outputs and
    tokens: they are written during the next chunk.
    """
    k_tile, q_tile, v_tile, solve_tile, within_tile, factors, o_tiles = tiles
    full, empty = bars
    dtype: gl.constexpr = k_tile.dtype
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, L, 16])
    of_narrow: gl.constexpr = gl.DotOperandLayout(0, narrow, 2)
    of_state: gl.constexpr = gl.DotOperandLayout(0, state.type.layout, 2)
    token: gl.constexpr = gl.SliceLayout(0, narrow)
    nothing = gl.zeros([_C, L], gl.float32, narrow)
    first, behind = piece_of(span, piece)
    later = gl.load(decay_ptr + first, mask=first < behind, other=0.0)
    for begin in range(first, behind, L):
        here = step % STAGES
        decay = later
        later = gl.load(decay_ptr + (begin + L), mask=begin + L < behind, other=0.0)
        left = gl.convert_layout(state.to(dtype), of_narrow)
        mbarrier.wait(full.index(here), (step // STAGES) & 1)
        k = k_tile.index(here)
        told = warpgroup_mma(left, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        v = v_tile.index(here * WIDE + WHICH).permute((1, 0)).load(narrow).to(gl.float32)
        if OUT:
            _put(o, o_tiles.index(WHICH), o_ptr, last[0], last[1], G, V, L)
        state = state * decay
        if not OUT:
            v = gl.where(in_values, v, nothing)
        of_x = gl.expand_dims(factors.index(here * 3).load(token), 0)
        told = warpgroup_mma_wait(0, deps=(told,))
        x = gl.convert_layout((v - told * of_x).to(dtype), of_narrow)
        u = warpgroup_mma(x, solve_tile.index(here).permute((1, 0)), nothing, use_acc=False, is_async=True)
        if OUT:
            read = warpgroup_mma(left, q_tile.index(here).permute((1, 0)), nothing, use_acc=False, is_async=True)
        of_u = gl.expand_dims(factors.index(here * 3 + 2).load(token), 0)
        u = warpgroup_mma_wait(1 if OUT else 0, deps=(u,))
        change = gl.convert_layout((u * of_u).to(dtype), of_state)
        state = warpgroup_mma(change, k, state, is_async=True)
        if OUT:
            moved = gl.convert_layout(u.to(dtype), of_narrow)
            of_o = gl.expand_dims(factors.index(here * 3 + 1).load(token), 0)
            read = warpgroup_mma_wait(1, deps=(read,))
            within = within_tile.index(here).permute((1, 0))
            read = warpgroup_mma(moved, within, read * of_o, is_async=True)
            state, read = warpgroup_mma_wait(0, deps=(state, read))
            o = read.to(dtype)
            last = (begin, behind)
        else:
            state = warpgroup_mma_wait(0, deps=(state,))
        mbarrier.arrive(empty.index(here), count=1)
        step += 1
    return state, step, o, last


@gluon.jit
def _multiply(
    where, span, tile, head, tiles, bars, pointers, o_ptr, decay_ptr, states_block, in_values, WHICH: gl.constexpr,
    G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, L: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr,
    RUN: gl.constexpr,
):  # fmt: skip
    """Run the chunks over a warpgroup's columns, and write the states."""
    OUT: gl.constexpr = RUN != _CARRIES
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, L, 16])
    tile = tile * WIDE + WHICH
    o_ptr += WHICH * _C
    state = state_before(where, span, tile, head, pointers, states_block, G, K, V, _C, RUN, wide)
    o = gl.zeros([_C, L], tiles[0].dtype, narrow)
    step = span[0] * 0
    last = (span[0], span[0])
    for piece in range(2):
        state, step, o, last = _run(
            piece, span, step, state, o, last, tiles, bars, decay_ptr, o_ptr, in_values, WHICH,
            G, V, L, WIDE, STAGES, OUT,
        )  # fmt: skip
        leave(piece, where, span, tile, head, state, pointers, states_block, G, K, V, _C, RUN, wide)
    if OUT:
        _put(o, tiles[6].index(WHICH), o_ptr, last[0], last[1], G, V, L)


@gluon.jit(do_not_specialize=["num_tokens", "part"])
def gated_delta_hopper_chunks(
    q_desc, k_desc, v_desc, solve_desc, within_desc, factors_ptr, states_ptr, o_ptr,
    start_ptr, reads_ptr, writes_ptr, fresh_ptr, marks_ptr, marked_ptr,
    first_ptr, length_ptr, row_ptr, of_ptr, carried_ptr, states_block, num_tokens, part, part_chunks,
    H: gl.constexpr, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, L: gl.constexpr, SHORT: gl.constexpr,
    WIDE: gl.constexpr, STAGES: gl.constexpr, RUN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Run the chunks of a row, of a part or of a segment, over 64 columns of a head's state for each of WIDE
    warpgroups. Rows of at most SHORT tokens are left out.

    first_ptr, length_ptr, row_ptr, of_ptr: the chunks, for parts; the segments, for segments.
    part, part_chunks: this launch's part, and how many chunks a part has.
    carried_ptr: float32 [D, G, V + K, K]; see segments.py.
    """
    OUT: gl.constexpr = RUN != _CARRIES
    dtype: gl.constexpr = k_desc.dtype
    shared: gl.constexpr = k_desc.layout
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if PDL:  # behind the wait: the part behind this one is prepared without waiting for what was in front of it
        gdc_wait()
        gdc_launch_dependents()
    tile, head, at = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    tables = (start_ptr, marks_ptr, first_ptr, length_ptr, row_ptr, of_ptr)
    where, span = span_of(at, part, part_chunks, tables, SHORT, RUN)
    k_tile = gl.allocate_shared_memory(dtype, [STAGES, L, K], shared)
    q_tile = gl.allocate_shared_memory(dtype, [STAGES if OUT else 1, L, K], shared)
    v_tile = gl.allocate_shared_memory(dtype, [STAGES * WIDE, L, _C], shared)
    solve_tile = gl.allocate_shared_memory(dtype, [STAGES, L, L], shared)
    within_tile = gl.allocate_shared_memory(dtype, [STAGES if OUT else 1, L, L], shared)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES * 3, L], line)
    o_tiles = gl.allocate_shared_memory(dtype, [WIDE if OUT else 1, L, _C], shared)
    filled = (k_tile, q_tile, v_tile, solve_tile, within_tile, factors)
    tiles = (k_tile, q_tile, v_tile, solve_tile, within_tile, factors, o_tiles)
    full, empty = barriers(STAGES + 1), barriers(STAGES, WIDE)
    bars = (full, empty)
    fence_async_shared()
    in_values = tile < V // (_C * WIDE)
    of_head = factors_ptr + head.to(gl.int64) * 4 * num_tokens
    decay_ptr = of_head + 3 * num_tokens
    o_ptr += head * V + tile * (_C * WIDE)
    descs = (k_desc, q_desc, v_desc, solve_desc, within_desc)
    places = (head // (G // H) * K, head * V + tile * (_C * WIDE), head * num_tokens)
    pointers = (states_ptr, carried_ptr, reads_ptr, writes_ptr, fresh_ptr, marks_ptr, marked_ptr, start_ptr)
    if WIDE == 1:
        gl.warp_specialize(
            [
                (_multiply, (
                    where, span, tile, head, tiles, bars, pointers, o_ptr, decay_ptr, states_block, in_values, 0,
                    G, K, V, L, WIDE, STAGES, RUN,
                )),
                (_fill, (
                    span, filled, full, empty, descs, places, of_head, num_tokens, in_values, K, L, WIDE, STAGES, OUT,
                )),
            ],
            [1],
            [72],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    where, span, tile, head, tiles, bars, pointers, o_ptr, decay_ptr, states_block, in_values, 0,
                    G, K, V, L, WIDE, STAGES, RUN,
                )),
                (_multiply, (
                    where, span, tile, head, tiles, bars, pointers, o_ptr, decay_ptr, states_block, in_values, 1,
                    G, K, V, L, WIDE, STAGES, RUN,
                )),
                (_fill, (
                    span, filled, full, empty, descs, places, of_head, num_tokens, in_values, K, L, WIDE, STAGES, OUT,
                )),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip


def _aot(run: int, wide: int) -> AotKernel:
    """Some numbers spill where a row begins and ends."""
    box = f"tensordesc<bf16[{CHUNK}, {{}}],{_layout()!r}>"
    types = dict.fromkeys(("q_desc", "k_desc"), box.format(128))
    types |= dict.fromkeys(("v_desc", "solve_desc", "within_desc"), box.format(64))
    types |= {"factors_ptr": "*fp32", "states_ptr": "*fp32", "o_ptr": "*bf16"} | ROW_TYPES
    types |= {"states_block": "i32:16"} | dict.fromkeys(("num_tokens", "part", "part_chunks"), "i32")
    constants: dict[str, int | None] = {"H": 16, "G": 32, "K": 128, "V": 128, "L": CHUNK, "SHORT": 1}
    constants |= {"WIDE": wide, "STAGES": 3, "RUN": run}
    types |= CHUNK_TYPES | {"of_ptr": "*i32", "carried_ptr": "*fp32"}
    return AotKernel(
        gated_delta_hopper_chunks, types, constants, num_warps=4, registers=REGISTERS if wide == 1 else None,
        tensor_cores="HGMMA", archs=("sm_90",),
    )  # fmt: skip


AOT = (_aot(ROWS, 2), _aot(ROWS, 1), _aot(CARRIES, 2), _aot(OUTPUTS, 1))
