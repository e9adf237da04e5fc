"""The end of a tile of hopper_tiles.py: scales, bias, activation, rounding, and the rows of real pairs to memory.

Legend:
    W  pairs of a warpgroup
    C  weight rows of a tile: outputs, or as many gates as matching ups
    F  outputs of a tile
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ridgeline.kernels.hopper.finish import halves, neighbours
from ridgeline.kernels.small.activation.triton import gated


@gluon.jit
def _biased(value, bias_ptr, column, OUTPUTS: gl.constexpr):
    """Add the bias of the columns from `column` on."""
    at = column + gl.arange(0, value.shape[1], gl.SliceLayout(0, value.type.layout))
    return value + gl.expand_dims(gl.load(bias_ptr + at, mask=at < OUTPUTS, other=0).to(gl.float32), 0)


@gluon.jit
def lines_of(token_ptr, pair, pairs, layout: gl.constexpr, GATHER: gl.constexpr):
    """Return (the rows of x that 64 pairs have, which of them are real)."""
    row_W = gl.arange(0, 64, layout)
    line_W = pair + row_W
    if GATHER:
        line_W = gl.load(token_ptr + line_W, mask=row_W < pairs, other=0)
    return line_W, row_W < pairs


@gluon.jit
def _scaled(value, scale_ptr, column, scale_W, OUTPUTS: gl.constexpr):
    """Multiply the columns from `column` on with their scales, and rows with theirs."""
    at = column + gl.arange(0, value.shape[1], gl.SliceLayout(0, value.type.layout))
    scale = gl.load(scale_ptr + at, mask=at < OUTPUTS, other=0)
    return value * gl.expand_dims(scale_W, 1) * gl.expand_dims(scale, 0)


@gluon.jit
def finish(
    sum_WC, scale_ptr, x_scale_ptr, token_ptr, bias_ptr, y_ptr, pair, pairs, column,
    OUTPUTS: gl.constexpr, SCALED: gl.constexpr, GATHER: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Finish a warpgroup's part of a tile whose sums are in one piece. scale: of the expert's rows, if SCALED."""
    if GATE != "":
        gate_WF, up_WF = halves(sum_WC)
    else:
        gate_WF, up_WF = sum_WC, sum_WC
    if SCALED:
        line_W, real_W = lines_of(token_ptr, pair, pairs, gl.SliceLayout(1, gate_WF.type.layout), GATHER)
        scale_W = gl.load(x_scale_ptr + line_W, mask=real_W, other=0)
        gate_WF = _scaled(gate_WF, scale_ptr, column, scale_W, OUTPUTS)
        if GATE != "":
            up_WF = _scaled(up_WF, scale_ptr + OUTPUTS, column, scale_W, OUTPUTS)
    write(gate_WF, up_WF, bias_ptr, y_ptr, pair, pairs, column, OUTPUTS, BIAS, GATE)


@gluon.jit
def write(
    y_WF, up_WF, bias_ptr, y_ptr, pair, pairs, column,
    OUTPUTS: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Write the rows of real pairs: bias, activation, rounding."""
    if BIAS:
        y_WF = _biased(y_WF, bias_ptr, column, OUTPUTS)
    if GATE != "":
        if BIAS:
            up_WF = _biased(up_WF, bias_ptr + OUTPUTS, column, OUTPUTS)
        y_WF = gated(y_WF, up_WF, GATE)
    layout: gl.constexpr = neighbours(y_WF.shape[1])
    y_WF = gl.convert_layout(y_WF.to(y_ptr.dtype.element_ty), layout)
    row_W1 = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
    column_1F = gl.expand_dims(column + gl.arange(0, y_WF.shape[1], gl.SliceLayout(0, layout)), 0)
    pointers = y_ptr + (pair + row_W1).to(gl.int64) * OUTPUTS + column_1F
    gl.store(pointers, y_WF, mask=(row_W1 < pairs) & (column_1F < OUTPUTS))
