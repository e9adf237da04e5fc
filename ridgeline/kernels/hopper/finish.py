"""The end of a tile of Hopper's products: sums of several programs together, bias, gated activation, rounding.

Legend:
    C  weight rows of one part, which are the outputs of a tile
    T  tokens of a tile
    S  tokens of a share
"""

# ruff: noqa: RUF005 - Gluon knows no starred tuples
from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ridgeline.kernels.hopper.gluon_names import barrier
from ridgeline.kernels.small.activation.triton import gated


def shared_sums(size: int, split: int, stand_in: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for `size` sums of tiles that `split` programs share, and their counters of arrivals. Where nothing
    is split any pointer will do, and `stand_in` is returned."""
    if split == 1:
        return stand_in, stand_in
    return torch.empty(size, dtype=torch.float32, device=stand_in.device), _arrivals(stand_in.device)[split]


@cache
def _arrivals(device: torch.device) -> dict[int, Tensor]:
    """Return a counter per tile for each SPLIT. Between launches a counter is a multiple of its SPLIT, so every SPLIT
    has its own.

    They are made by the first eager launch, which comes before any graph is captured.
    """
    return {split: torch.zeros(512, dtype=torch.int32, device=device) for split in (2, 4, 8)}


@gluon.jit
def together(
    sums, sums_ptr, arrival_ptr, tile, part, left,
    ROWS: gl.constexpr, PARTS: gl.constexpr, TOKENS: gl.constexpr, SPLIT: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Return this program's share of the tokens, [S, C] for each part, added up over its tile's programs. left: how
    many tokens are real."""
    SHARE: gl.constexpr = TOKENS // SPLIT
    SIZE: gl.constexpr = PARTS * ROWS * TOKENS
    tile_ptr = sums_ptr + tile.to(gl.int64) * (SPLIT * SIZE)
    own: gl.constexpr = sums[0].type.layout
    row_C1 = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, own)), 1)
    token_1T = gl.expand_dims(gl.arange(0, TOKENS, gl.SliceLayout(0, own)), 0)
    for p in gl.static_range(PARTS):
        at = part * SIZE + p * (ROWS * TOKENS) + token_1T * ROWS + row_C1
        gl.store(tile_ptr + at, sums[p], mask=(token_1T < left) & (row_C1 >= 0))
    barrier()  # until every thread's sums are written, before one thread says so
    arrived = gl.atomic_add(arrival_ptr + tile, 1, sem="acq_rel") + 1
    all_here = ((arrived - 1) | (SPLIT - 1)) + 1
    while arrived - all_here < 0:
        arrived = gl.atomic_add(arrival_ptr + tile, 0, sem="acquire")
    token_S = part * SHARE + gl.arange(0, SHARE, gl.SliceLayout(1, layout))
    row_1C = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, layout)), 0)
    share = ()
    for p in gl.static_range(PARTS):
        at = p * (ROWS * TOKENS) + gl.expand_dims(token_S * ROWS, 1) + row_1C
        mask = gl.expand_dims(token_S < left, 1) & (row_1C >= 0)
        total = gl.zeros([SHARE, ROWS], gl.float32, layout)
        for other in gl.static_range(SPLIT):
            total += gl.load(tile_ptr + other * SIZE + at, mask=mask, other=0, cache_modifier=".cg")
        share = share + (total,)  # type: ignore[assignment]
    return share


@gluon.jit
def _biased(value, bias_ptr, row, outputs, AXIS: gl.constexpr):
    """Add the bias of the rows, which lie along axis 1 - AXIS, to `value`."""
    layout: gl.constexpr = gl.SliceLayout(AXIS, value.type.layout)
    at = row + gl.arange(0, value.shape[1 - AXIS], layout)
    return value + gl.expand_dims(gl.load(bias_ptr + at, mask=at < outputs, other=0).to(gl.float32), AXIS)


@gluon.jit
def finished(sums, bias_ptr, row, outputs, BIAS: gl.constexpr, GATE: gl.constexpr, AXIS: gl.constexpr):
    """Return the results of a tile whose rows lie along axis 1 - AXIS: with bias and activation, in float32."""
    y = sums[0]
    if BIAS:
        y = _biased(y, bias_ptr, row, outputs, AXIS)
    if GATE != "":
        up = sums[1]
        if BIAS:
            up = _biased(up, bias_ptr + outputs, row, outputs, AXIS)
        y = gated(y, up, GATE)
    return y


@gluon.jit
def write(y, y_ptr, row, token, tokens, outputs, AXIS: gl.constexpr, layout: gl.constexpr):
    """Round the results of a tile to the type of `y_ptr`, and write them in `layout`."""
    y = gl.convert_layout(y.to(y_ptr.dtype.element_ty), layout)
    row_C = row + gl.arange(0, y.shape[1 - AXIS], gl.SliceLayout(AXIS, layout))
    token_T = token + gl.arange(0, y.shape[AXIS], gl.SliceLayout(1 - AXIS, layout))
    at = gl.expand_dims(token_T.to(gl.int64) * outputs, 1 - AXIS) + gl.expand_dims(row_C, AXIS)
    kept = gl.expand_dims(token_T < tokens, 1 - AXIS) & gl.expand_dims(row_C < outputs, AXIS)
    gl.store(y_ptr + at, y, mask=kept)


@gluon.jit
def write_rounded(y, y_ptr, y_scale_ptr, row, token, tokens, outputs, AXIS: gl.constexpr, layout: gl.constexpr):
    """Round the results of a tile, whose 128 rows lie along axis 1 - AXIS, to E4M3 with a scale for each token. Larger
    quotients than 448, by a rounding, saturate."""
    largest_T = gl.max(gl.abs(y), 1 - AXIS)
    scale_T = gl.maximum(largest_T * (1 / 448), 1e-30)
    at_T = token + gl.arange(0, y.shape[AXIS], scale_T.type.layout)
    gl.store(y_scale_ptr + row // 128 * tokens + at_T, scale_T, mask=at_T < tokens)
    write(y * gl.expand_dims(1 / scale_T, 1 - AXIS), y_ptr, row, token, tokens, outputs, AXIS, layout)


@gluon.jit
def store(
    sums, bias_ptr, y_ptr, row, token, tokens, outputs,
    BIAS: gl.constexpr, GATE: gl.constexpr, AXIS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Finish a tile whose rows lie along axis 1 - AXIS: bias, activation and rounding. It is written in `layout`."""
    y = finished(sums, bias_ptr, row, outputs, BIAS, GATE, AXIS)
    write(y, y_ptr, row, token, tokens, outputs, AXIS, layout)


@gluon.constexpr_function
def tall(rows, warps):
    """Return the layout [C, T] in which a tile of so many rows is written."""
    return gl.BlockedLayout([8, 1], [int(rows) // 8, 256 // int(rows)], [1, int(warps)], [0, 1])


@gluon.constexpr_function
def wide(rows, warps):
    """Return the layout [S, C] in which a share of such a tile is written."""
    return gl.BlockedLayout([1, 4], [128 // int(rows), int(rows) // 4], [int(warps), 1], [1, 0])


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
