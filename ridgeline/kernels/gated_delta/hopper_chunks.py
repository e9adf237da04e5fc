"""The gated delta rule over the chunks of long rows, for Hopper: several products under way at once.

As in triton_chunks.py, a warpgroup has 64 columns of a head's state in registers, as [columns, keys], and goes through
chunks in order. It starts a product before it needs the one in front: the values' product runs beside that of the state
with the keys, the state's product with the queries beside the rounding of the changes, and outputs are handed over
beside the next chunk's first products. All products of a chunk take 1,152 cycles of a multiprocessor.
So that nothing else is in their way, other warps fill the ring of chunks, and others write the outputs.

A program runs a whole row, or a segment of one (segments.py).

Legend: that of triton_prepare.py, and
    D  segments
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.aot import AotKernel
from ridgeline.kernels.gated_delta.hopper_states import CARRIES, OUTPUTS, ROWS, cells_of, piece_of
from ridgeline.kernels.gated_delta.triton_prepare import CHUNK
from ridgeline.kernels.gated_delta.triton_step import aot_types
from ridgeline.kernels.gluon_names import barrier, barriers, load_rows

_CARRIES, _OUTPUTS = gl.constexpr(CARRIES), gl.constexpr(OUTPUTS)
_WARPS = gl.constexpr(4)  # that fill the ring, and as many that write


@gluon.jit
def _ask(
    begin, behind, here, tiles, sources, k_token: gl.constexpr, v_token: gl.constexpr, num_tokens, in_values,
    K: gl.constexpr, L: gl.constexpr, C: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Ask for a chunk's tiles and factors. Tokens from `behind` on become zeros."""
    k, q, v, solve, within, factors, _ = tiles
    q_ptr, k_ptr, v_ptr, solve_ptr, within_ptr, factors_ptr = sources
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // K, K // 8], [_WARPS, 1], [1, 0])
    i = gl.expand_dims(gl.arange(0, L, gl.SliceLayout(1, wide)), 1)
    key = gl.expand_dims(gl.arange(0, K, gl.SliceLayout(0, wide)), 0)
    live = (begin + i < behind) & (key >= 0)
    at = begin.to(gl.int64) * k_token
    load_rows(k.index(here), k_ptr + at + (i * k_token + key), mask=live)
    if OUT:
        load_rows(q.index(here), q_ptr + at + (i * k_token + key), mask=live)
    square: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // L, L // 8], [_WARPS, 1], [1, 0])
    i = gl.expand_dims(gl.arange(0, L, gl.SliceLayout(1, square)), 1)
    j = gl.expand_dims(gl.arange(0, L, gl.SliceLayout(0, square)), 0)
    live = (begin + i < behind) & (j >= 0)
    at = begin.to(gl.int64) * L
    load_rows(solve.index(here), solve_ptr + at + (i * L + j), mask=live)
    if OUT:
        load_rows(within.index(here), within_ptr + at + (i * L + j), mask=live)
    values: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // C, C // 8], [_WARPS, 1], [1, 0])
    i = gl.expand_dims(gl.arange(0, L, gl.SliceLayout(1, values)), 1)
    column = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, values)), 0)
    live = (begin + i < behind) & (column >= 0) & in_values
    load_rows(v.index(here), v_ptr + begin.to(gl.int64) * v_token + (i * v_token + column), mask=live)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
    i = gl.arange(0, L, line)
    live = begin + i < behind
    load_rows(factors.index(here * 3), factors_ptr + (begin + i), mask=live)
    if OUT:
        load_rows(factors.index(here * 3 + 1), factors_ptr + num_tokens + (begin + i), mask=live)
    load_rows(factors.index(here * 3 + 2), factors_ptr + 2 * num_tokens + (begin + i), mask=live)


@gluon.jit
def _fill(
    span, tiles, full, empty, sources, k_token: gl.constexpr, v_token: gl.constexpr, num_tokens, in_values,
    K: gl.constexpr, L: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Fill the ring with chunks. A chunk is announced when the next one has been asked for."""
    LAG: gl.constexpr = STAGES - 2
    step = span[0] * 0
    for piece in range(2):
        first, behind = piece_of(span, piece)
        for begin in range(first, behind, L):
            here = step % STAGES
            mbarrier.wait(empty.index(here), ((step // STAGES) & 1) ^ 1)
            _ask(begin, behind, here, tiles, sources, k_token, v_token, num_tokens, in_values, K, L, C, OUT)
            async_copy.commit_group()
            async_copy.wait_group(LAG)
            fence_async_shared()
            barrier()  # every warp's copies are there
            mbarrier.arrive(full.index((step + STAGES - LAG) % STAGES), count=1, pred=step >= LAG)
            step += 1
    for i in gl.static_range(LAG):
        async_copy.wait_group(LAG - 1 - i)
        fence_async_shared()
        barrier()
        last = step - LAG + i
        mbarrier.arrive(full.index((last + STAGES) % STAGES), count=1, pred=last >= 0)


@gluon.jit
def _write(
    span, o_tiles, o_full, o_empty, o_ptr,
    G: gl.constexpr, V: gl.constexpr, L: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Write the chunks' outputs."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // C, C // 8], [_WARPS, 1], [1, 0])
    i = gl.expand_dims(gl.arange(0, L, gl.SliceLayout(1, layout)), 1)
    column = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, layout)), 0)
    step = span[0] * 0
    for piece in range(2):
        first, behind = piece_of(span, piece)
        for begin in range(first, behind, L):
            slot = step % 2
            mbarrier.wait(o_full.index(slot), (step // 2) & 1)
            y = o_tiles.index(slot).load(layout)
            barrier()
            mbarrier.arrive(o_empty.index(slot), count=1)
            live = (begin + i < behind) & (column >= 0)
            at = begin.to(gl.int64) * (G * V)  # type: ignore[attr-defined]
            gl.store(o_ptr + at + (i * (G * V) + column), y, mask=live)
            step += 1


@gluon.jit
def _hand(o, o_tiles, o_full, o_empty, number):
    """Hand a chunk's outputs, [columns, tokens], to the warps that write. Number -1 is no chunk: nobody hears of it."""
    slot = (number + 2) % 2
    mbarrier.wait(o_empty.index(slot), ((number // 2) & 1) ^ 1, pred=number >= 0)
    o_tiles.index(slot).permute((1, 0)).store(o)
    barrier()
    mbarrier.arrive(o_full.index(slot), count=1, pred=number >= 0)


@gluon.jit
def _run(
    piece, span, step, state, o, tiles, bars, decay_ptr,
    L: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Run a piece of the row. Return the state after it, the next chunk's number and the last one's outputs, which are
    handed over during the next one.
    """
    k_tile, q_tile, v_tile, solve_tile, within_tile, factors, o_tiles = tiles
    full, empty, o_full, o_empty = bars
    dtype: gl.constexpr = k_tile.dtype
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C // 16, 1], [16, L, 16])
    of_narrow: gl.constexpr = gl.DotOperandLayout(0, narrow, 2)
    of_state: gl.constexpr = gl.DotOperandLayout(0, state.type.layout, 2)
    token: gl.constexpr = gl.SliceLayout(0, narrow)
    nothing = gl.zeros([C, L], gl.float32, narrow)
    first, behind = piece_of(span, piece)
    later = gl.load(decay_ptr + first, mask=first < behind, other=0.0)
    left = gl.convert_layout(state.to(dtype), of_narrow)
    for begin in range(first, behind, L):
        here = step % STAGES
        decay = later
        later = gl.load(decay_ptr + (begin + L), mask=begin + L < behind, other=0.0)
        mbarrier.wait(full.index(here), (step // STAGES) & 1)
        k = k_tile.index(here)
        solve = solve_tile.index(here).permute((1, 0))
        told = warpgroup_mma(left, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        u = warpgroup_mma(v_tile.index(here).permute((1, 0)), solve, nothing, use_acc=False, is_async=True)
        if OUT:
            _hand(o, o_tiles, o_full, o_empty, step - 1)
        of_x = gl.expand_dims(factors.index(here * 3).load(token), 0)
        told = warpgroup_mma_wait(1, deps=(told,))
        x = gl.convert_layout((told * -of_x).to(dtype), of_narrow)
        u = warpgroup_mma(x, solve, u, is_async=True)
        if OUT:
            read = warpgroup_mma(left, q_tile.index(here).permute((1, 0)), nothing, use_acc=False, is_async=True)
        state = state * decay
        of_u = gl.expand_dims(factors.index(here * 3 + 2).load(token), 0)
        u = warpgroup_mma_wait(1 if OUT else 0, deps=(u,))
        change = gl.convert_layout((u * of_u).to(dtype), of_state)
        state = warpgroup_mma(change, k, state, is_async=True)
        if OUT:
            moved = gl.convert_layout(u.to(dtype), of_narrow)
            within = within_tile.index(here).permute((1, 0))
            added = warpgroup_mma(moved, within, nothing, use_acc=False, is_async=True)
            of_o = gl.expand_dims(factors.index(here * 3 + 1).load(token), 0)
            state, read = warpgroup_mma_wait(1, deps=(state, read))
            left = gl.convert_layout(state.to(dtype), of_narrow)
            added = warpgroup_mma_wait(0, deps=(added,))
            o = (read * of_o + added).to(dtype)
        else:
            state = warpgroup_mma_wait(0, deps=(state,))
            left = gl.convert_layout(state.to(dtype), of_narrow)
        mbarrier.arrive(empty.index(here), count=1)
        step += 1
    return state, step, o


@gluon.jit
def _multiply(
    row, at, tile, head, span, live, tiles, bars, states_ptr, carried_ptr, decay_ptr,
    reads_ptr, writes_ptr, fresh_ptr, marks_ptr, marked_ptr, start_ptr, states_block,
    G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, L: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    RUN: gl.constexpr,
):  # fmt: skip
    """Run the chunks, and write the states."""
    OUT: gl.constexpr = RUN != _CARRIES
    dtype: gl.constexpr = tiles[0].dtype
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C // 16, 1], [16, K, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C // 16, 1], [16, L, 16])
    states_ptr += head * (K * V) + tile * C
    columns = cells_of(1, V, K, C, wide)  # of a state in its block, [keys, values]
    cells = cells_of(K, 1, K, C, wide)
    step = span[0] * 0
    if RUN == 0:
        exists = (columns >= 0) & (gl.load(fresh_ptr + row) == 0)
        state = gl.load(states_ptr + gl.load(reads_ptr + row) * states_block + columns, mask=exists, other=0)
    else:
        carried_ptr += ((at.to(gl.int64) * G + head) * (V + K) + tile * C) * K
        if RUN == _CARRIES:
            same = cells - cells // K * (K + 1) == tile * C - V
            state = gl.where(same & (tile >= V // C), 1.0, 0.0)
        else:
            state = gl.load(carried_ptr + cells)
    o = gl.zeros([C, L], dtype, narrow)
    mark = gl.load(marks_ptr + row)
    for piece in range(2):
        state, step, o = _run(piece, span, step, state, o, tiles, bars, decay_ptr, L, C, STAGES, OUT)
        if RUN == 0:  # noqa: SIM102
            if live & ((piece == 1) | (mark > 0)):
                block = gl.where(piece == 1, gl.load(writes_ptr + row), gl.load(marked_ptr + row))
                gl.store(states_ptr + block * states_block + columns, state)
    if OUT:
        _hand(o, tiles[6], bars[2], bars[3], step - 1)
    if RUN == _CARRIES:  # noqa: SIM102
        if live:
            gl.store(carried_ptr + cells, state)
    if RUN == _OUTPUTS:  # noqa: SIM102
        if live:
            behind = span[2]
            if (behind == gl.load(start_ptr + row) + mark) & (mark > 0):
                gl.store(states_ptr + gl.load(marked_ptr + row) * states_block + columns, state)
            if behind == gl.load(start_ptr + row + 1):
                gl.store(states_ptr + gl.load(writes_ptr + row) * states_block + columns, state)


@gluon.jit(do_not_specialize=["num_tokens"])
def gated_delta_hopper_chunks(
    q_ptr, k_ptr, v_ptr, solve_ptr, within_ptr, factors_ptr, states_ptr, o_ptr,
    start_ptr, reads_ptr, writes_ptr, fresh_ptr, marks_ptr, marked_ptr, first_ptr, length_ptr, row_ptr, carried_ptr,
    k_token: gl.constexpr, v_token: gl.constexpr, states_block, num_tokens,
    H: gl.constexpr, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, L: gl.constexpr, SHORT: gl.constexpr,
    C: gl.constexpr, STAGES: gl.constexpr, RUN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Run a row's chunks, or a segment's, over C columns of a head's state: 64 for each warpgroup. Rows of at most
    SHORT tokens are left out.

    first_ptr, length_ptr, row_ptr: the segments, if RUN is not ROWS.
    carried_ptr: float32 [D, G, V + K, K]; see segments.py.
    """
    dtype: gl.constexpr = k_ptr.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    OUT: gl.constexpr = RUN != _CARRIES
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile, head, at = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    row, length = at, at * 0
    if RUN != 0:
        length = gl.load(length_ptr + at)
        row = gl.where(length > 0, gl.load(row_ptr + at), 0)
    start, end = gl.load(start_ptr + row), gl.load(start_ptr + row + 1)
    live = end - start > SHORT
    first, middle, behind = start, start + gl.load(marks_ptr + row), end
    if RUN != 0:
        live = live & (length > 0)
        first = gl.load(first_ptr + at)
        middle, behind = first, first + length
    span = (first, gl.where(live, middle, first), gl.where(live, behind, first))  # of no tokens if it is not live
    k_tile = gl.allocate_shared_memory(dtype, [STAGES, L, K], shared)
    q_tile = gl.allocate_shared_memory(dtype, [STAGES if OUT else 1, L, K], shared)
    v_tile = gl.allocate_shared_memory(dtype, [STAGES, L, C], shared)
    solve_tile = gl.allocate_shared_memory(dtype, [STAGES, L, L], shared)
    within_tile = gl.allocate_shared_memory(dtype, [STAGES if OUT else 1, L, L], shared)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES * 3, L], line)
    o_tiles = gl.allocate_shared_memory(dtype, [2 if OUT else 1, L, C], shared)
    tiles = (k_tile, q_tile, v_tile, solve_tile, within_tile, factors, o_tiles)
    full, empty, o_full, o_empty = barriers(STAGES), barriers(STAGES), barriers(2), barriers(2)
    fence_async_shared()
    key_head = head // (G // H)
    in_values = tile < V // C
    sources = (
        q_ptr + key_head * K, k_ptr + key_head * K, v_ptr + (head * V + tile * C),
        solve_ptr + head.to(gl.int64) * num_tokens * L, within_ptr + head.to(gl.int64) * num_tokens * L,
        factors_ptr + head.to(gl.int64) * 4 * num_tokens,
    )  # fmt: skip
    o_ptr += head * V + tile * C
    decay_ptr = factors_ptr + (head.to(gl.int64) * 4 + 3) * num_tokens
    bars = (full, empty, o_full, o_empty)
    if OUT:
        gl.warp_specialize(
            [
                (_multiply, (
                    row, at, tile, head, span, live, tiles, bars, states_ptr, carried_ptr, decay_ptr, reads_ptr,
                    writes_ptr, fresh_ptr, marks_ptr, marked_ptr, start_ptr, states_block,
                    G, K, V, L, C, STAGES, RUN,
                )),
                (_fill, (
                    span, tiles, full, empty, sources, k_token, v_token, num_tokens, in_values, K, L, C, STAGES, OUT,
                )),
                (_write, (span, o_tiles, o_full, o_empty, o_ptr, G, V, L, C)),
            ],
            [_WARPS, _WARPS],
            [152 if C == 64 else 72, 104 if C == 64 else 40],  # registers; those that multiply have the rest
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    row, at, tile, head, span, live, tiles, bars, states_ptr, carried_ptr, decay_ptr, reads_ptr,
                    writes_ptr, fresh_ptr, marks_ptr, marked_ptr, start_ptr, states_block,
                    G, K, V, L, C, STAGES, RUN,
                )),
                (_fill, (
                    span, tiles, full, empty, sources, k_token, v_token, num_tokens, in_values, K, L, C, STAGES, OUT,
                )),
            ],
            [_WARPS],
            [152 if C == 64 else 72],
        )  # fmt: skip


def _aot(run: int, columns: int, stages: int) -> AotKernel:
    """With 128 columns the warps that multiply have fewer registers than they need, and spill some."""
    absent = ("q_token", "a_ptr", "b_ptr", "log_rate_ptr", "dt_bias_ptr", "a_token", "b_token", "scale", "norm_eps")
    types = {name: kind for name, kind in aot_types().items() if name not in absent}
    types |= dict.fromkeys(("solve_ptr", "within_ptr"), "*bf16") | {"factors_ptr": "*fp32", "num_tokens": "i32"}
    constants: dict[str, int | None] = {"H": 16, "G": 32, "K": 128, "V": 128, "L": CHUNK, "SHORT": 1}
    for name in ("k_token", "v_token"):
        del types[name]
    constants |= {"k_token": 8192, "v_token": 8192, "C": columns, "STAGES": stages, "RUN": run}
    segments = dict.fromkeys(("first_ptr", "length_ptr", "row_ptr"), "*i32") | {"carried_ptr": "*fp32"}
    if run == ROWS:
        constants |= dict.fromkeys(segments)
    else:
        types |= segments
    return AotKernel(
        gated_delta_hopper_chunks,
        types,
        constants,
        num_warps=columns // 16,
        hot=columns == 64,
        tensor_cores="HGMMA",
        archs=("sm_90",),
    )


AOT = (_aot(ROWS, 64, 3), _aot(CARRIES, 64, 3))
