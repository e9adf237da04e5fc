"""The end of a tile of Hopper's products: sums of several programs together, bias, gated activation, rounding.

Legend:
    C  weight rows of one part, which are the outputs of a tile
    T  tokens of a tile
    X  all sums of a tile in a row
"""

# ruff: noqa: RUF005 - Gluon knows no starred tuples
from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ridgeline.kernels.base.counters import counters
from ridgeline.kernels.hopper.gluon_names import barrier
from ridgeline.kernels.small.activation.triton import gated


def shared_sums(size: int, tiles: int, split: int, stand_in: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for `size` sums of `tiles` tiles that `split` programs share, and their counters of arrivals. Where
    nothing is split any pointer will do, and `stand_in` is returned."""
    if split == 1:
        return stand_in, stand_in
    return torch.empty(size, dtype=torch.float32, device=stand_in.device), counters(stand_in.device, tiles)


@gluon.jit
def _in_a_row(sum_CT, WARPS: gl.constexpr):
    """Return a tile's sums as a row in which a thread's are neighbours by fours, and a warp's by 128. No number
    moves."""
    ROWS: gl.constexpr = sum_CT.shape[0]
    TOKENS: gl.constexpr = sum_CT.shape[1]
    x = sum_CT.reshape([ROWS // (16 * WARPS), WARPS, 2, 8, TOKENS // 8, 4, 2])
    return x.permute((0, 4, 1, 3, 5, 2, 6)).reshape([ROWS * TOKENS])


@gluon.jit
def _as_tile(sum_X, like, WARPS: gl.constexpr):
    """Return the tile of such a row, in the layout of `like`."""
    ROWS: gl.constexpr = like.shape[0]
    TOKENS: gl.constexpr = like.shape[1]
    x = sum_X.reshape([ROWS // (16 * WARPS), TOKENS // 8, WARPS, 8, 4, 2, 2])
    x = x.permute((0, 2, 5, 3, 1, 4, 6)).reshape([ROWS, TOKENS])
    return gl.convert_layout(x, like.type.layout, assert_trivial=True)


@gluon.jit
def _places(row_X, TOKENS: gl.constexpr, WARPS: gl.constexpr):
    """Return (the places of a row's numbers, the first of the eight tokens that each belongs to)."""
    at_X = gl.arange(0, row_X.shape[0], row_X.type.layout)
    return at_X, at_X // (128 * WARPS) % (TOKENS // 8) * 8


@gluon.jit
def leave(sums, to_ptr, left, WARPS: gl.constexpr):
    """Write a program's sums of each part, [C, T], for another program. left: how many tokens are real."""
    SIZE: gl.constexpr = sums[0].shape[0] * sums[0].shape[1]
    for p in gl.static_range(len(sums)):
        sum_X = _in_a_row(sums[p], WARPS)
        at_X, token_X = _places(sum_X, sums[0].shape[1], WARPS)
        gl.store(to_ptr + p * SIZE + at_X, sum_X, mask=token_X < left)


@gluon.jit
def left_by(from_ptr, like, left, WARPS: gl.constexpr):
    """Return the sums that a program has left there, with the shapes and layouts of `like`."""
    SIZE: gl.constexpr = like[0].shape[0] * like[0].shape[1]
    found = ()
    for p in gl.static_range(len(like)):
        at_X, token_X = _places(_in_a_row(like[p], WARPS), like[0].shape[1], WARPS)
        sum_X = gl.load(from_ptr + p * SIZE + at_X, mask=token_X < left, other=0, cache_modifier=".cg")
        found = found + (_as_tile(sum_X, like[p], WARPS),)  # type: ignore[assignment]
    return found


@gluon.jit
def plus(sums, more):
    """Return the sums of each part of both."""
    found = ()
    for p in gl.static_range(len(sums)):
        found = found + (sums[p] + more[p],)  # type: ignore[assignment]
    return found


@gluon.jit
def arrives_last(sums, sums_ptr, arrival_ptr, tile, part, left, WARPS: gl.constexpr, SPLIT: gl.constexpr):
    """Leave this program's sums for the last of the SPLIT programs of its tile that comes here, and return True in that
    one. It then has to add them up (`added`). No program waits for another."""
    SIZE: gl.constexpr = len(sums) * sums[0].shape[0] * sums[0].shape[1]
    leave(sums, sums_ptr + (tile.to(gl.int64) * SPLIT + part) * SIZE, left, WARPS)
    barrier()  # until every thread's sums are written, before one thread says so
    last = gl.atomic_add(arrival_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
    if last:
        gl.store(arrival_ptr + tile, 0)
    return last


@gluon.jit
def added(sums, sums_ptr, tile, part, left, WARPS: gl.constexpr, SPLIT: gl.constexpr):
    """Return the sums of all programs of a tile, added up in their order whichever of them is this one.

    sums: must not be products of two numbers. A compiler may add such a product without rounding it first, so that the
        result would depend on the program.
    """
    SIZE: gl.constexpr = len(sums) * sums[0].shape[0] * sums[0].shape[1]
    tile_ptr = sums_ptr + tile.to(gl.int64) * (SPLIT * SIZE)
    if SPLIT == 2:  # a sum of two is the same in either order, so this program's need not be read again
        return plus(sums, left_by(tile_ptr + (1 - part) * SIZE, sums, left, WARPS))
    else:
        total = left_by(tile_ptr, sums, left, WARPS)
        if SIZE <= 32 * 32 * WARPS:  # 32 sums of a thread: all programs' are on their way at once
            for other in gl.static_range(1, SPLIT):
                total = plus(total, left_by(tile_ptr + other * SIZE, sums, left, WARPS))
        else:  # so many would not fit the registers
            for later in range(1, SPLIT):
                total = plus(total, left_by(tile_ptr + later * SIZE, sums, left, WARPS))
        return total


@gluon.jit
def _biased(value_CT, bias_ptr, row, outputs):
    """Add the bias of the rows."""
    at_C = row + gl.arange(0, value_CT.shape[0], gl.SliceLayout(1, value_CT.type.layout))
    return value_CT + gl.expand_dims(gl.load(bias_ptr + at_C, mask=at_C < outputs, other=0).to(gl.float32), 1)


@gluon.jit
def finished(sums, bias_ptr, row, outputs, BIAS: gl.constexpr, GATE: gl.constexpr):
    """Return the results of a tile, [C, T]: with bias and activation, in float32."""
    y = sums[0]
    if BIAS:
        y = _biased(y, bias_ptr, row, outputs)
    if GATE != "":
        up = sums[1]
        if BIAS:
            up = _biased(up, bias_ptr + outputs, row, outputs)
        y = gated(y, up, GATE)
    return y


@gluon.jit
def write(y_CT, y_ptr, row, token, tokens, outputs, layout: gl.constexpr):
    """Round the results of a tile to the type of `y_ptr`, and write them in `layout`."""
    y_CT = gl.convert_layout(y_CT.to(y_ptr.dtype.element_ty), layout)
    row_C1 = gl.expand_dims(row + gl.arange(0, y_CT.shape[0], gl.SliceLayout(1, layout)), 1)
    token_1T = gl.expand_dims(token + gl.arange(0, y_CT.shape[1], gl.SliceLayout(0, layout)), 0)
    gl.store(y_ptr + token_1T.to(gl.int64) * outputs + row_C1, y_CT, mask=(token_1T < tokens) & (row_C1 < outputs))


@gluon.jit
def write_rounded(y_CT, y_ptr, y_scale_ptr, row, token, tokens, outputs, layout: gl.constexpr):
    """Round the results of a tile of 128 rows to E4M3 with a scale for each token. Larger quotients than 448, by a
    rounding, saturate."""
    largest_T = gl.max(gl.abs(y_CT), 0)
    scale_T = gl.maximum(largest_T * (1 / 448), 1e-30)
    at_T = token + gl.arange(0, y_CT.shape[1], scale_T.type.layout)
    gl.store(y_scale_ptr + row // 128 * tokens + at_T, scale_T, mask=at_T < tokens)
    write(y_CT * gl.expand_dims(1 / scale_T, 0), y_ptr, row, token, tokens, outputs, layout)


@gluon.jit
def store(
    sums, bias_ptr, y_ptr, row, token, tokens, outputs,
    BIAS: gl.constexpr, GATE: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Finish a tile: bias, activation and rounding. It is written in `layout`."""
    write(finished(sums, bias_ptr, row, outputs, BIAS, GATE), y_ptr, row, token, tokens, outputs, layout)


@gluon.constexpr_function
def tall(rows, warps):
    """Return the layout [C, T] in which a tile of so many rows is written."""
    return gl.BlockedLayout([8, 1], [int(rows) // 8, 256 // int(rows)], [1, int(warps)], [0, 1])


@gluon.constexpr_function
def neighbours(columns):
    """Return a layout of 64 rows with 8 neighbouring columns in a thread, so that they are stored at once. Rows stay in
    the warp in which products leave them."""
    wide = [[0, 32 << i] for i in range((int(columns) // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *wide],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, int(columns)],
    )


@gluon.jit
def halves(x):
    """Return the left and the right half of a tensor, whose columns a thread holds in both. No number moves."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
