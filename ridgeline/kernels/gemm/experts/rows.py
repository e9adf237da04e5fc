"""Experts' products of a few tokens on the vector units: the rows of the experts that tokens chose are streamed.

A program computes a few outputs from whole rows, which it asks for at once, as soon as it knows the expert. Many
programs share a multiprocessor, and so hide how long each of them waits. In the second op a program takes all experts
of a token, so their sum needs no other launch.

The routes are known before the first op begins. Its programs (those of tiles.py too) let the next kernel start only
when they have waited, so every kernel behind it may read the routes at once. The second op asks for its weights before
it waits for the first.

Legend:
    H  the two halves: gate and up
    C  outputs of a program
    K  experts of a token, padded to a power of two
    B  inputs, padded to a power of two
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.gemm.experts.choose import Rows, choose_down, choose_gate_up
from ridgeline.kernels.small.activation.triton import gated


@triton.jit
def load_weights(pointers, mask):
    """Load plain weights of experts. They are read once a step and should not push out of the cache what is read
    again."""
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def gate_up_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, expert_ptr, place_ptr, y_ptr, x_stride,
    M: tl.constexpr, F: tl.constexpr, E: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    BIAS: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute C outputs of one pair. Grid (tiles of F, pairs in the order of tokens)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # after the wait, so that later kernels may read the routes
    pair = tl.program_id(1)
    expert = tl.load(expert_ptr + pair).to(tl.int64)
    place = tl.load(place_ptr + pair).to(tl.int64)
    input_11B = tl.arange(0, BLOCK)[None, None, :]
    kept_11B = input_11B < M
    x_11B = tl.load(x_ptr + (pair // K).to(tl.int64) * x_stride + input_11B, mask=kept_11B, other=0.0)
    if expert < E:
        column_C = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        half_H = tl.arange(0, 2)
        row_HC = half_H[:, None] * F + tl.minimum(column_C, F - 1)[None, :]
        row_HC = expert * (2 * F) + row_HC
        w_HCB = load_weights(weight_ptr + row_HC[:, :, None] * M + input_11B, kept_11B)
        y_HC = tl.sum(w_HCB.to(tl.float32) * x_11B.to(tl.float32), 2)
        if BIAS:
            y_HC += tl.load(bias_ptr + row_HC).to(tl.float32)
        gate_C, up_C = tl.split(tl.permute(y_HC, (1, 0)))
        y_C = gated(gate_C, up_C, GATE)
        tl.store(y_ptr + place * F + column_C, y_C.to(y_ptr.dtype.element_ty), mask=column_C < F)


@triton.jit
def down_rows_kernel(
    h_ptr, weight_ptr, bias_ptr, expert_ptr, weight_of_ptr, place_ptr, add_ptr, y_ptr, add_stride,
    F: tl.constexpr, M: tl.constexpr, E: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute C outputs of one token: the weighted sum over its experts. Grid (tiles of M, tokens). CHOICES is a power
    of two that covers K."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(1)
    choice_K = tl.arange(0, CHOICES)
    expert_K = tl.load(expert_ptr + token * K + choice_K, mask=choice_K < K, other=E).to(tl.int64)
    place_K = tl.load(place_ptr + token * K + choice_K, mask=choice_K < K, other=0).to(tl.int64)
    computed_K = expert_K < E
    column_C = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    input_11B = tl.arange(0, BLOCK)[None, None, :]
    kept_K1B = computed_K[:, None, None] & (input_11B < F)
    row_KC = expert_K[:, None] * M + tl.minimum(column_C, M - 1)[None, :]
    w_KCB = load_weights(weight_ptr + row_KC[:, :, None] * F + input_11B, kept_K1B)
    if PDL:
        tl.extra.cuda.gdc_wait()
    h_K1B = tl.load(h_ptr + place_K[:, None, None] * F + input_11B, mask=kept_K1B, other=0.0)
    factor_K = tl.load(weight_of_ptr + token * K + choice_K, mask=computed_K, other=0.0)
    y_KC = tl.sum(w_KCB.to(tl.float32) * h_K1B.to(tl.float32), 2)
    if BIAS:
        y_KC += tl.load(bias_ptr + row_KC, mask=computed_K[:, None], other=0.0).to(tl.float32)
    y_C = tl.sum(y_KC * factor_K[:, None], 0)
    kept_C = column_C < M
    if ADD:
        y_C += tl.load(add_ptr + token.to(tl.int64) * add_stride + column_C, mask=kept_C, other=0.0).to(tl.float32)
    tl.store(y_ptr + token.to(tl.int64) * M + column_C, y_C.to(y_ptr.dtype.element_ty), mask=kept_C)


def _aot_gate_up(width: int, inner: int, experts: int, used: int, *archs: str) -> AotKernel:
    plan = choose_gate_up(1, width, inner, experts=experts, used=used)
    assert isinstance(plan, Rows)
    signature = {f"{name}_ptr": "*bf16" for name in ("x", "weight", "bias", "y")}
    signature |= {"expert_ptr": "*i32", "place_ptr": "*i32", "x_stride": "i32:16"}
    shape = {"M": width, "F": inner, "E": experts, "K": used, "ROWS": plan.rows, "BLOCK": plan.block}
    return AotKernel(
        gate_up_rows_kernel,
        signature,
        shape | {"BIAS": False, "GATE": "silu"},
        num_warps=plan.warps,
        hot=True,
        archs=archs,
    )


def _aot_down(width: int, inner: int, experts: int, used: int, *archs: str) -> AotKernel:
    plan = choose_down(1, inner, width, experts=experts, used=used)
    assert isinstance(plan, Rows)
    signature = {f"{name}_ptr": "*bf16" for name in ("h", "weight", "bias", "add", "y")}
    signature |= {"expert_ptr": "*i32", "weight_of_ptr": "*fp32", "place_ptr": "*i32", "add_stride": "i32:16"}
    shape = {"F": inner, "M": width, "E": experts, "K": used, "CHOICES": used, "ROWS": plan.rows, "BLOCK": plan.block}
    return AotKernel(
        down_rows_kernel, signature, shape | {"BIAS": False, "ADD": False}, num_warps=plan.warps, hot=True, archs=archs
    )


AOT = (
    _aot_gate_up(2048, 768, 128, 8, *ONE_OF_EACH),
    _aot_down(2048, 768, 128, 8, *ONE_OF_EACH),
    _aot_down(4096, 14_336, 8, 2, "sm_90"),
)
