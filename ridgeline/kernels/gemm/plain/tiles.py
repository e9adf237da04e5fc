"""Linear maps of a few dozen tokens on the matrix units: each program owns a tile of weight rows and all tokens.

The weight tile is the left operand, since it has the many rows that the matrix units want. The tokens, padded to a
tile, are the columns. A gated pair's tile has its gate rows first, then the up rows of the same outputs. If a matrix
has too few tiles for the device, SPLIT programs share a tile's inputs. The last of them to arrive adds up all parts in
their order, so the result does not depend on which one that was.

Legend:
    R  weight rows of a tile
    C  outputs of a tile (half of its rows if gated)
    T  tokens
    B  inputs of a block
    L  cache lines
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.gemm.plain.blocks import fetch_lines
from ridgeline.kernels.small.activation.triton import gated

LINE = tl.constexpr(64)  # elements of two bytes in a cache line


@triton.jit
def _load(pointers, kept, input_B, inputs, WHOLE: tl.constexpr, DOT: tl.constexpr):
    """Load a block of weights or of x.

    kept: a mask of the pointers' shape, or None.
    input_B: the inputs of the block, in the pointers' rank.
    """
    if WHOLE:
        values = tl.load(pointers) if kept is None else tl.load(pointers, mask=kept, other=0.0)
    else:
        mask = input_B < inputs if kept is None else kept & (input_B < inputs)
        values = tl.load(pointers, mask=mask, other=0.0)
    return values.to(DOT)


@triton.jit(do_not_specialize=["tokens"])
def tiles_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    parts_ptr,
    arrivals_ptr,
    x_stride,
    tokens,
    outputs,
    inputs,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    AHEAD: tl.constexpr,  # inputs of this program's rows to prefetch into the cache before the wait (with PDL)
    WHOLE: tl.constexpr,  # inputs is a multiple of BLOCK * SPLIT: no masks along the inputs
    DOT: tl.constexpr,  # dtype of the operands
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute y [T, O].

    GATE: "" or the activation. With one the weight's rows are O gates, then O ups.
    parts: float32 [tiles, SPLIT, R, T].
    arrivals: a zero per tile, which is zero again at the end.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    part = tl.program_id(1)
    COLUMNS: tl.constexpr = ROWS if GATE == "" else ROWS // 2  # columns of the result
    token_T = tl.arange(0, TOKENS)
    local_R = tl.arange(0, ROWS)
    # Rows past the end repeat the last one, so the loads of weights need no mask
    row_R = tl.minimum(tile * COLUMNS + local_R % COLUMNS, outputs - 1) + local_R // COLUMNS * outputs
    steps = tl.cdiv(inputs, BLOCK * SPLIT)
    begin = part * steps * BLOCK
    end = tl.minimum(begin + steps * BLOCK, inputs)
    input_B = begin + tl.arange(0, BLOCK)
    rows_R1 = weight_ptr + row_R.to(tl.int64)[:, None] * inputs
    weights_RB = rows_R1 + input_B[None, :]
    x_BT = x_ptr + token_T[None, :] * x_stride + input_B[:, None]
    valid_BT = (token_T < tokens)[None, :] & (input_B >= 0)[:, None]

    # No kernel writes weights, so the first ones are loaded while the kernel before this one ends
    w_RB = _load(weights_RB, None, input_B[None, :], inputs, WHOLE, DOT)
    if PDL:
        if AHEAD > 0:
            line_L = begin + tl.arange(0, AHEAD // LINE) * LINE
            fetch_lines(rows_R1 + tl.minimum(line_L, inputs - 1)[None, :])
        tl.extra.cuda.gdc_wait()

    acc_RT = tl.zeros((ROWS, TOKENS), tl.float32)
    a_BT = _load(x_BT, valid_BT, input_B[:, None], inputs, WHOLE, DOT)
    acc_RT = tl.dot(w_RB, a_BT, acc_RT, input_precision="ieee")
    for start in tl.range(BLOCK, end - begin, BLOCK, num_stages=STAGES):
        w_RB = _load(weights_RB + start, None, start + input_B[None, :], inputs, WHOLE, DOT)
        a_BT = _load(x_BT + start, valid_BT, start + input_B[:, None], inputs, WHOLE, DOT)
        acc_RT = tl.dot(w_RB, a_BT, acc_RT, input_precision="ieee")

    mine = True
    if SPLIT > 1:
        size: tl.constexpr = ROWS * TOKENS
        parts_RT = parts_ptr + tile.to(tl.int64) * (SPLIT * size) + local_R[:, None] * TOKENS + token_T[None, :]
        tl.store(parts_RT + part * size, acc_RT)
        tl.debug_barrier()  # until every thread's part is written, before any thread of this program says so
        mine = tl.atomic_add(arrivals_ptr + tile, 1) == SPLIT - 1
        if mine:
            tl.store(arrivals_ptr + tile, 0)
            acc_RT = tl.zeros((ROWS, TOKENS), tl.float32)
            for other in tl.static_range(SPLIT):
                acc_RT += tl.load(parts_RT + other * size, cache_modifier=".cg")

    if mine:
        column_C = tile * COLUMNS + tl.arange(0, COLUMNS)
        kept_C = column_C < outputs
        if GATE == "":
            y_CT = acc_RT
            if BIAS:
                y_CT += tl.load(bias_ptr + column_C, mask=kept_C, other=0.0).to(tl.float32)[:, None]
        else:
            y_CT, up_CT = tl.split(acc_RT.reshape(2, COLUMNS, TOKENS).permute(1, 2, 0))
            if BIAS:
                y_CT += tl.load(bias_ptr + column_C, mask=kept_C, other=0.0).to(tl.float32)[:, None]
                up_CT += tl.load(bias_ptr + outputs + column_C, mask=kept_C, other=0.0).to(tl.float32)[:, None]
            y_CT = gated(y_CT, up_CT, GATE)
        tl.store(
            y_ptr + token_T[None, :] * outputs.to(tl.int64) + column_C[:, None],
            y_CT.to(y_ptr.dtype.element_ty),
            mask=kept_C[:, None] & (token_T[None, :] < tokens),
        )


def _aot(rows: int, tokens: int, block: int, stages: int, split: int, *, gate: str, unit: str) -> AotKernel:
    signature = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "y_ptr"), "*bf16")
    signature |= {"parts_ptr": "*fp32", "arrivals_ptr": "*i32", "x_stride": "i32:16", "tokens": "i32"}
    signature |= dict.fromkeys(("outputs", "inputs"), "i32:16")
    cut = {"ROWS": rows, "TOKENS": tokens, "BLOCK": block, "STAGES": stages, "SPLIT": split, "AHEAD": 512}
    flags = {"WHOLE": True, "DOT": tl.bfloat16, "BIAS": False, "GATE": gate}
    return AotKernel(tiles_kernel, signature, cut | flags, num_warps=4, hot=True, tensor_cores=unit)


AOT = (
    _aot(64, 16, 128, 4, 4, gate="", unit="HGMMA"),
    _aot(64, 32, 128, 3, 1, gate="silu", unit="HGMMA"),
)
