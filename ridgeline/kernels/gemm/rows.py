"""A few tokens times a matrix on the vector units: each program streams a few whole weight rows.

With a norm, y = (Σ w·n·s) · rsqrt(mean(s²) + eps): the scale factors out of the product, so each program adds up s² on
the way and needs no kernel before it. Legend: R weight rows, T tokens, B inputs of one block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.activation.triton import activate
from ridgeline.kernels.aot import AotKernel
from ridgeline.kernels.gemm.blocks import summed


@triton.jit(do_not_specialize=["tokens"])
def rows_kernel(
    x_ptr,
    residual_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    s_ptr,
    x_stride,
    residual_stride,
    tokens,
    outputs,
    eps,
    inputs: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [T, O]; s [T, I] with a residual. GATE: "" or the activation; the weight's rows are then O gates and O ups."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * ROWS
    row_R = first + tl.arange(0, ROWS)
    token_T = tl.arange(0, TOKENS)
    input_B = tl.arange(0, BLOCK)
    # Rows past the end repeat the last one: no mask on the loads that matter
    row_R11 = tl.minimum(row_R, outputs - 1).to(tl.int64)[:, None, None]
    weights_R1B = weight_ptr + row_R11 * inputs + input_B[None, None, :]
    ups_R1B = weights_R1B + outputs.to(tl.int64) * inputs
    token_1T1 = token_T[None, :, None]
    valid_1T1 = token_1T1 < tokens

    # Weights are never written by a kernel: the first ones are under way while the kernel before drains
    valid_11B = (input_B < inputs)[None, None, :]
    w_R1B = tl.load(weights_R1B, mask=valid_11B, other=0.0)
    if GATE != "":
        u_R1B = tl.load(ups_R1B, mask=valid_11B, other=0.0)
    if NORM:
        n_11B = tl.load(norm_ptr + input_B[None, None, :], mask=valid_11B, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()

    acc_RTB = tl.zeros((ROWS, TOKENS, BLOCK), tl.float32)
    up_RTB = tl.zeros((ROWS, TOKENS, BLOCK), tl.float32)
    squares_1TB = tl.zeros((1, TOKENS, BLOCK), tl.float32)
    for start in tl.static_range(0, inputs, BLOCK):
        input_11B = start + input_B[None, None, :]
        mask_1TB = valid_1T1 & (input_11B < inputs)
        s_1TB = summed(
            x_ptr,
            residual_ptr,
            token_1T1 * x_stride + input_11B,
            token_1T1 * residual_stride + input_11B,
            mask_1TB,
            RESIDUAL,
        )
        a_1TB = s_1TB.to(tl.float32)
        if NORM:
            if RESIDUAL:
                tl.store(s_ptr + token_1T1 * inputs + input_11B, s_1TB, mask=mask_1TB & (first + token_1T1 * 0 == 0))
            squares_1TB += a_1TB * a_1TB
            a_1TB *= n_11B.to(tl.float32)
        acc_RTB += w_R1B.to(tl.float32) * a_1TB
        if GATE != "":
            up_RTB += u_R1B.to(tl.float32) * a_1TB
        if start + BLOCK < inputs:
            valid_11B = input_11B + BLOCK < inputs
            w_R1B = tl.load(weights_R1B + (start + BLOCK), mask=valid_11B, other=0.0)
            if GATE != "":
                u_R1B = tl.load(ups_R1B + (start + BLOCK), mask=valid_11B, other=0.0)
            if NORM:
                n_11B = tl.load(norm_ptr + BLOCK + input_11B, mask=valid_11B, other=0.0)

    scale_1T = tl.full((1, TOKENS), 1.0, tl.float32)
    if NORM:
        scale_1T = tl.rsqrt(tl.sum(squares_1TB, 2) / inputs + eps)
    y_RT = tl.sum(acc_RTB, 2) * scale_1T
    kept_R = row_R < outputs
    if BIAS:
        y_RT += tl.load(bias_ptr + row_R, mask=kept_R, other=0.0).to(tl.float32)[:, None]
    if GATE != "":
        up_RT = tl.sum(up_RTB, 2) * scale_1T
        if BIAS:
            up_RT += tl.load(bias_ptr + outputs + row_R, mask=kept_R, other=0.0).to(tl.float32)[:, None]
        y_RT = activate(y_RT, GATE) * up_RT
    tl.store(
        y_ptr + token_T[None, :] * outputs.to(tl.int64) + row_R[:, None],
        y_RT.to(y_ptr.dtype.element_ty),
        mask=kept_R[:, None] & (token_T[None, :] < tokens),
    )


def _aot(inputs: int, rows: int, tokens: int, block: int, warps: int, *, norm: bool, gate: str) -> AotKernel:
    pointers = ("x_ptr", "residual_ptr", "norm_ptr", "weight_ptr", "bias_ptr", "y_ptr", "s_ptr")
    signature = dict.fromkeys(pointers, "*bf16") | dict.fromkeys(("x_stride", "residual_stride"), "i32:16")
    signature |= {"tokens": "i32", "outputs": "i32:16", "eps": "fp32"}
    cut = {"inputs": inputs, "ROWS": rows, "TOKENS": tokens, "BLOCK": block}
    flags = {"NORM": norm, "RESIDUAL": norm, "BIAS": False, "GATE": gate}
    return AotKernel(rows_kernel, signature, cut | flags, num_warps=warps, hot=True)


AOT = (
    _aot(14_336, 1, 1, 4096, 4, norm=False, gate=""),
    _aot(4096, 1, 1, 4096, 4, norm=True, gate="silu"),
    _aot(1024, 2, 2, 1024, 4, norm=True, gate=""),
)
