"""Up to a hundred tokens times a matrix on the matrix units: each program owns a tile of weight rows and all tokens.

The weight tile is the left operand, since it has the many rows that the matrix units want; the tokens, padded to a
tile, are the columns. Where a matrix has too few tiles for the device, SPLIT programs share a tile's inputs; the last
of them to arrive adds up all parts in their order, so the result does not depend on who that was.
With a norm the scale is applied to the sums, as in rows.py. Legend: R weight rows, T tokens, B inputs of one block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.activation.triton import activate
from ridgeline.kernels.aot import AotKernel
from ridgeline.kernels.gemm.blocks import summed

LINE = tl.constexpr(64)  # elements of two bytes in a line of the cache


@triton.jit
def _fetch(pointers):
    """Ask for the cache lines at `pointers` without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, False, 1
    )


@triton.jit
def _tokens(
    x_ptr,
    residual_ptr,
    norm_ptr,
    s_ptr,
    x_stride,
    residual_stride,
    tokens,
    inputs,
    input_B,
    tile,
    squares_T,
    TOKENS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WHOLE: tl.constexpr,
    DOT: tl.constexpr,
):
    """(the right operand [B, T], squares_T + Σ s²) for the inputs `input_B`."""
    token_1T = tl.arange(0, TOKENS)[None, :]
    input_B1 = input_B[:, None]
    mask_BT = token_1T < tokens
    if not WHOLE:
        mask_BT = mask_BT & (input_B1 < inputs)
    s_BT = summed(
        x_ptr,
        residual_ptr,
        token_1T * x_stride + input_B1,
        token_1T * residual_stride + input_B1,
        mask_BT,
        RESIDUAL,
    )
    if NORM:
        if RESIDUAL:
            tl.store(s_ptr + token_1T * inputs + input_B1, s_BT, mask=mask_BT & (tile + token_1T * 0 == 0))
        n_B = tl.load(norm_ptr + input_B, mask=input_B < inputs, other=0.0)
        a_BT = s_BT.to(tl.float32)
        squares_T += tl.sum(a_BT * a_BT, 0)
        s_BT = (a_BT * n_B.to(tl.float32)[:, None]).to(s_BT.dtype)
    return s_BT.to(DOT), squares_T


@triton.jit
def _weights(weights_RB, input_1B, inputs, WHOLE: tl.constexpr, DOT: tl.constexpr):
    w_RB = tl.load(weights_RB) if WHOLE else tl.load(weights_RB, mask=input_1B < inputs, other=0.0)
    return w_RB.to(DOT)


@triton.jit(do_not_specialize=["tokens"])
def tiles_kernel(
    x_ptr,
    residual_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    s_ptr,
    parts_ptr,
    arrivals_ptr,
    x_stride,
    residual_stride,
    tokens,
    outputs,
    inputs,
    eps,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    AHEAD: tl.constexpr,  # inputs of this program's rows to ask into the cache before waiting (with PDL)
    WHOLE: tl.constexpr,  # inputs is a multiple of BLOCK * SPLIT: no masks along the inputs
    DOT: tl.constexpr,  # dtype of the operands
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [T, O]; s [T, I] with a residual. parts: float32 [tiles, SPLIT, 2R + 1, T]; arrivals: zeros, left as zeros."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    part = tl.program_id(1)
    row_R = tile * ROWS + tl.arange(0, ROWS)
    token_T = tl.arange(0, TOKENS)
    # Rows past the end repeat the last one: no mask on the loads that matter
    row_R1 = tl.minimum(row_R, outputs - 1).to(tl.int64)[:, None]
    steps = tl.cdiv(inputs, BLOCK * SPLIT)
    begin = part * steps * BLOCK
    end = tl.minimum(begin + steps * BLOCK, inputs)
    input_B = begin + tl.arange(0, BLOCK)
    weights_RB = weight_ptr + row_R1 * inputs + input_B[None, :]
    ups = outputs.to(tl.int64) * inputs

    # Weights are never written by a kernel: the first ones are under way while the kernel before drains
    w_RB = _weights(weights_RB, input_B[None, :], inputs, WHOLE, DOT)
    if GATE != "":
        u_RB = _weights(weights_RB + ups, input_B[None, :], inputs, WHOLE, DOT)
    if PDL:
        if AHEAD > 0:
            line_L = tl.arange(0, AHEAD // LINE) * LINE
            lines_RL = weight_ptr + row_R1 * inputs + (begin + tl.minimum(line_L, end - begin - 1))[None, :]
            _fetch(lines_RL)
            if GATE != "":
                _fetch(lines_RL + ups)
        tl.extra.cuda.gdc_wait()

    acc_RT = tl.zeros((ROWS, TOKENS), tl.float32)
    up_RT = tl.zeros((ROWS, TOKENS), tl.float32)
    squares_T = tl.zeros((TOKENS,), tl.float32)
    x_BT, squares_T = _tokens(
        x_ptr, residual_ptr, norm_ptr, s_ptr, x_stride, residual_stride, tokens, inputs, input_B, tile, squares_T,
        TOKENS, NORM, RESIDUAL, WHOLE, DOT,
    )  # fmt: skip
    acc_RT = tl.dot(w_RB, x_BT, acc_RT, input_precision="ieee")
    if GATE != "":
        up_RT = tl.dot(u_RB, x_BT, up_RT, input_precision="ieee")
    for start in tl.range(BLOCK, end - begin, BLOCK, num_stages=STAGES):
        w_RB = _weights(weights_RB + start, start + input_B[None, :], inputs, WHOLE, DOT)
        x_BT, squares_T = _tokens(
            x_ptr, residual_ptr, norm_ptr, s_ptr, x_stride, residual_stride, tokens, inputs, start + input_B, tile,
            squares_T, TOKENS, NORM, RESIDUAL, WHOLE, DOT,
        )  # fmt: skip
        acc_RT = tl.dot(w_RB, x_BT, acc_RT, input_precision="ieee")
        if GATE != "":
            u_RB = _weights(weights_RB + ups + start, start + input_B[None, :], inputs, WHOLE, DOT)
            up_RT = tl.dot(u_RB, x_BT, up_RT, input_precision="ieee")

    mine = True
    if SPLIT > 1:
        size: tl.constexpr = (2 * ROWS + 1) * TOKENS
        place_RT = tl.arange(0, ROWS)[:, None] * TOKENS + token_T[None, :]
        tile_ptr = parts_ptr + tile.to(tl.int64) * (SPLIT * size)
        part_ptr = tile_ptr + part * size
        tl.store(part_ptr + place_RT, acc_RT)
        if GATE != "":
            tl.store(part_ptr + ROWS * TOKENS + place_RT, up_RT)
        if NORM:
            tl.store(part_ptr + 2 * ROWS * TOKENS + token_T, squares_T)
        tl.debug_barrier()  # every thread's part is written before any thread of this program says so
        mine = tl.atomic_add(arrivals_ptr + tile, 1) == SPLIT - 1
        if mine:
            tl.store(arrivals_ptr + tile, 0)
            acc_RT = tl.zeros((ROWS, TOKENS), tl.float32)
            up_RT = tl.zeros((ROWS, TOKENS), tl.float32)
            squares_T = tl.zeros((TOKENS,), tl.float32)
            for other in tl.static_range(SPLIT):
                part_ptr = tile_ptr + other * size
                acc_RT += tl.load(part_ptr + place_RT, cache_modifier=".cg")
                if GATE != "":
                    up_RT += tl.load(part_ptr + ROWS * TOKENS + place_RT, cache_modifier=".cg")
                if NORM:
                    squares_T += tl.load(part_ptr + 2 * ROWS * TOKENS + token_T, cache_modifier=".cg")

    if mine:
        kept_R = row_R < outputs
        if NORM:
            scale_T = tl.rsqrt(squares_T / inputs + eps)
            acc_RT *= scale_T[None, :]
            up_RT *= scale_T[None, :]
        if BIAS:
            acc_RT += tl.load(bias_ptr + row_R, mask=kept_R, other=0.0).to(tl.float32)[:, None]
        if GATE != "":
            if BIAS:
                up_RT += tl.load(bias_ptr + outputs + row_R, mask=kept_R, other=0.0).to(tl.float32)[:, None]
            acc_RT = activate(acc_RT, GATE) * up_RT
        tl.store(
            y_ptr + token_T[None, :] * outputs.to(tl.int64) + row_R[:, None],
            acc_RT.to(y_ptr.dtype.element_ty),
            mask=kept_R[:, None] & (token_T[None, :] < tokens),
        )


def _aot(
    rows: int, tokens: int, block: int, stages: int, warps: int, split: int, *, norm: bool, gate: str, unit: str
) -> AotKernel:
    pointers = ("x_ptr", "residual_ptr", "norm_ptr", "weight_ptr", "bias_ptr", "y_ptr", "s_ptr")
    signature = dict.fromkeys(pointers, "*bf16") | {"parts_ptr": "*fp32", "arrivals_ptr": "*i32"}
    signature |= dict.fromkeys(("x_stride", "residual_stride", "outputs", "inputs"), "i32:16")
    signature |= {"tokens": "i32", "eps": "fp32"}
    cut = {
        "ROWS": rows,
        "TOKENS": tokens,
        "BLOCK": block,
        "STAGES": stages,
        "SPLIT": split,
        "AHEAD": 512,
        "WHOLE": True,
    }
    flags = {"DOT": tl.bfloat16, "NORM": norm, "RESIDUAL": norm, "BIAS": False, "GATE": gate}
    return AotKernel(tiles_kernel, signature, cut | flags, num_warps=warps, hot=True, tensor_cores=unit)


AOT = (
    _aot(16, 16, 256, 4, 4, 1, norm=False, gate="", unit="HMMA"),
    _aot(64, 64, 64, 4, 4, 2, norm=False, gate="", unit="HGMMA"),
    _aot(32, 16, 64, 3, 4, 1, norm=True, gate="silu", unit="HMMA"),
)
