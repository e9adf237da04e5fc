"""Experts' products of a few tokens on the vector units, from matrices in FP8 or codes. rows.py says how the programs
share the work.

Numbers are widened to float32 in registers. A thread takes runs of 16 bytes, so that it adds up a run by itself, and
scales the sum: scales cost little, whatever the size of a group.

Legend:
    A  the two halves (gate and up), or the experts of a token
    C  outputs of a program
    N  runs of a block
    Q  bytes of a run
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.gemm.experts.choose import Rows
from ridgeline.kernels.gemm.experts.forms import Form, e2m1, e4m3, level, load_scales, scale_at
from ridgeline.kernels.small.activation.triton import gated


@triton.jit
def _stored(
    weight_ptr, row_AC, kept_A, start,
    I: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr, PER: tl.constexpr,  # noqa: E741
):  # fmt: skip
    """Load a block of the rows' bytes: [A, C, N, Q]."""
    N: tl.constexpr = BLOCK // (RUN * PER)
    byte_NQ = start // PER + tl.arange(0, N)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    mask = kept_A[:, None, None, None] & (byte_NQ < I // PER)[None, None]
    pointers = weight_ptr + row_AC[:, :, None, None] * (I // PER) + byte_NQ[None, None]
    return tl.load(pointers, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def _sums(
    byte_ACNQ, scale_ptr, zero_ptr, x_ptr, x_at_A, x_kept_A, expert_A, kept_A, line_AC, start,
    I: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr, PER: tl.constexpr, KIND: tl.constexpr,  # noqa: E741
    GROUP: tl.constexpr, LINES: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    """Return the sums of a block's products: [A, C]."""
    N: tl.constexpr = BLOCK // (RUN * PER)
    GROUPS: tl.constexpr = (I + GROUP - 1) // GROUP
    run_N = tl.arange(0, N)
    input_NQ = start + run_N[:, None] * (RUN * PER) + tl.arange(0, RUN)[None, :] * PER
    x_kept = x_kept_A[:, None, None, None] & (input_NQ < I)[None, None]
    x_at = x_ptr + x_at_A[:, None, None, None] + input_NQ[None, None]
    group_N = (start + run_N * (RUN * PER)) // GROUP
    at_ACN = scale_at(expert_A[:, None, None], line_AC[:, :, None], group_N[None, None], LINES, GROUPS)
    scale_kept = kept_A[:, None, None] & (group_N < GROUPS)[None, None]
    scale_ACN = load_scales(scale_ptr + at_ACN, scale_kept, SCALES) * LIFT
    if KIND == "fp8":
        x = tl.load(x_at, mask=x_kept, other=0.0).to(tl.float32) * LIFT
        sum_ACN = tl.sum(e4m3(byte_ACNQ, LIFT) * x, 3)
    else:
        half = tl.arange(0, 2)
        both = tl.load(x_at[:, :, :, :, None] + half, mask=x_kept[:, :, :, :, None] & (half < 2), other=0.0)
        low, high = tl.split(both.to(tl.float32) * LIFT)
        if KIND == "e2m1":
            sum_ACN = tl.sum(e2m1(byte_ACNQ, 0) * low + e2m1(byte_ACNQ, 4) * high, 3)
        else:
            middle = 136.0
            if ZEROS:
                middle = 128.0 + tl.load(zero_ptr + at_ACN, mask=scale_kept, other=0).to(tl.float32)
            sum_ACN = tl.sum(level(byte_ACNQ, 0) * low + level(byte_ACNQ, 4) * high, 3)
            sum_ACN -= middle * tl.sum(low + high, 3)
    return tl.sum(scale_ACN * sum_ACN, 2)


@triton.jit
def _products(
    first_ACNQ, weight_ptr, scale_ptr, zero_ptr, factor_ptr, x_ptr, x_at_A, x_kept_A, expert_A, kept_A, row_AC,
    line_AC,
    I: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr, PER: tl.constexpr, KIND: tl.constexpr,  # noqa: E741
    GROUP: tl.constexpr, LINES: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, FACTOR: tl.constexpr,
    LIFT: tl.constexpr,
):  # fmt: skip
    """Return the rows' products [A, C]. first: the bytes of the first block."""
    y_AC = tl.zeros(row_AC.shape, tl.float32)
    for start in tl.static_range(0, I, BLOCK):
        byte_ACNQ = first_ACNQ
        if start > 0:
            byte_ACNQ = _stored(weight_ptr, row_AC, kept_A, start, I, BLOCK, RUN, PER)
        y_AC += _sums(
            byte_ACNQ, scale_ptr, zero_ptr, x_ptr, x_at_A, x_kept_A, expert_A, kept_A, line_AC, start, I, BLOCK, RUN,
            PER, KIND, GROUP, LINES, SCALES, ZEROS, LIFT,
        )  # fmt: skip
    if FACTOR:
        y_AC *= tl.load(factor_ptr + expert_A, mask=kept_A, other=0.0)[:, None]
    return y_AC


@triton.jit
def gate_up_quantized_rows_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, factor_ptr, bias_ptr, expert_ptr, place_ptr, y_ptr, x_stride,
    M: tl.constexpr, F: tl.constexpr, E: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    RUN: tl.constexpr, PER: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    SCALES: tl.constexpr, ZEROS: tl.constexpr, FACTOR: tl.constexpr, LIFT: tl.constexpr,
    BIAS: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute C outputs of one pair. Grid (tiles of F, pairs in the order of tokens)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # after the wait, so that later kernels may read the routes
    pair = tl.program_id(1)
    expert = tl.load(expert_ptr + pair).to(tl.int64)
    place = tl.load(place_ptr + pair).to(tl.int64)
    if expert < E:
        column_C = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        half_A = tl.arange(0, 2)
        kept_A = half_A < 2
        local_AC = half_A[:, None] * F + tl.minimum(column_C, F - 1)[None, :]
        row_AC = expert * (2 * F) + local_AC
        x_at_A = (pair // K).to(tl.int64) * x_stride + tl.arange(0, 1)
        first_ACNQ = _stored(weight_ptr, row_AC, kept_A, 0, M, BLOCK, RUN, PER)
        y_AC = _products(
            first_ACNQ, weight_ptr, scale_ptr, zero_ptr, factor_ptr, x_ptr, x_at_A, x_at_A >= 0, expert + half_A * 0,
            kept_A, row_AC, local_AC // SPAN, M, BLOCK, RUN, PER, KIND, GROUP, (2 * F + SPAN - 1) // SPAN, SCALES,
            ZEROS, FACTOR, LIFT,
        )  # fmt: skip
        if BIAS:
            y_AC += tl.load(bias_ptr + row_AC).to(tl.float32)
        gate_C, up_C = tl.split(tl.permute(y_AC, (1, 0)))
        y_C = gated(gate_C, up_C, GATE)
        tl.store(y_ptr + place * F + column_C, y_C.to(y_ptr.dtype.element_ty), mask=column_C < F)


@triton.jit
def down_quantized_rows_kernel(
    h_ptr, weight_ptr, scale_ptr, zero_ptr, factor_ptr, bias_ptr, expert_ptr, weight_of_ptr, place_ptr, add_ptr,
    y_ptr, add_stride,
    F: tl.constexpr, M: tl.constexpr, E: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, RUN: tl.constexpr, PER: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    SPAN: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, FACTOR: tl.constexpr, LIFT: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute C outputs of one token: the weighted sum over its experts. Grid (tiles of M, tokens). CHOICES is a power
    of two that covers K."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(1)
    choice_A = tl.arange(0, CHOICES)
    expert_A = tl.load(expert_ptr + token * K + choice_A, mask=choice_A < K, other=E).to(tl.int64)
    place_A = tl.load(place_ptr + token * K + choice_A, mask=choice_A < K, other=0).to(tl.int64)
    kept_A = expert_A < E
    column_C = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    local_C = tl.minimum(column_C, M - 1)
    row_AC = expert_A[:, None] * M + local_C[None, :]
    line_AC = expert_A[:, None] * 0 + local_C[None, :] // SPAN
    first_ACNQ = _stored(weight_ptr, row_AC, kept_A, 0, F, BLOCK, RUN, PER)
    if PDL:
        tl.extra.cuda.gdc_wait()
    factor_A = tl.load(weight_of_ptr + token * K + choice_A, mask=kept_A, other=0.0)
    y_AC = _products(
        first_ACNQ, weight_ptr, scale_ptr, zero_ptr, factor_ptr, h_ptr, place_A * F, kept_A, expert_A, kept_A, row_AC,
        line_AC, F, BLOCK, RUN, PER, KIND, GROUP, (M + SPAN - 1) // SPAN, SCALES, ZEROS, FACTOR, LIFT,
    )  # fmt: skip
    if BIAS:
        y_AC += tl.load(bias_ptr + row_AC, mask=kept_A[:, None], other=0.0).to(tl.float32)
    y_C = tl.sum(y_AC * factor_A[:, None], 0)
    kept_C = column_C < M
    if ADD:
        y_C += tl.load(add_ptr + token.to(tl.int64) * add_stride + column_C, mask=kept_C, other=0.0).to(tl.float32)
    tl.store(y_ptr + token.to(tl.int64) * M + column_C, y_C.to(y_ptr.dtype.element_ty), mask=kept_C)


def _aot(
    kernel: Any, form: Form, rows: Rows, width: int, inner: int, experts: int, used: int, **more: Any
) -> AotKernel:
    bf16 = ("x_ptr", "h_ptr", "bias_ptr", "add_ptr", "y_ptr")
    names = [name for name in kernel.arg_names if name.endswith(("_ptr", "_stride"))]
    types = dict.fromkeys(bf16, "*bf16") | dict.fromkeys(("weight_ptr", "zero_ptr"), "*u8")
    types |= {
        "scale_ptr": "*u8" if form.scales != "float" else "*fp32",
        "factor_ptr": "*fp32",
        "weight_of_ptr": "*fp32",
    }
    types |= dict.fromkeys(("expert_ptr", "place_ptr"), "*i32") | dict.fromkeys(("x_stride", "add_stride"), "i32:16")
    shape = {"M": width, "F": inner, "E": experts, "K": used, "ROWS": rows.rows, "BLOCK": rows.block}
    shape |= form.constants() | {"RUN": form.run, "PER": form.per_byte, "BIAS": False} | more
    signature = {name: types[name] for name in names}
    return AotKernel(
        kernel, signature, shape, num_warps=rows.warps, hot=True, archs=("sm_90",) if form.native else ONE_OF_EACH
    )


_MXFP4, _FP8 = Form("e2m1", 32, scales="e8m0"), Form("fp8", 128, 128)
_NATIVE = Form("fp8", 128, 128, native=True)
AOT = (
    _aot(gate_up_quantized_rows_kernel, _MXFP4, Rows(4, 1024, 4), 2880, 2880, 32, 4, GATE="swiglu_clamped"),
    _aot(gate_up_quantized_rows_kernel, _FP8, Rows(2, 2048, 4), 2048, 768, 128, 8, GATE="silu"),
    _aot(down_quantized_rows_kernel, _MXFP4, Rows(2, 1024, 4), 2880, 2880, 32, 4, CHOICES=4, ADD=False),
    _aot(down_quantized_rows_kernel, _FP8, Rows(2, 256, 4), 2048, 768, 128, 8, CHOICES=8, ADD=False),
    _aot(gate_up_quantized_rows_kernel, _NATIVE, Rows(2, 1024, 4), 2048, 768, 128, 8, GATE="silu"),
    _aot(down_quantized_rows_kernel, _NATIVE, Rows(2, 256, 4), 2048, 768, 128, 8, CHOICES=8, ADD=False),
)
