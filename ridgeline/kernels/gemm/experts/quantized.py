"""Launches for experts' matrices in FP8 or codes: rows of a few tokens, and widening for products in 16 bits.

Legend: see op.py
    O  outputs of an expert's matrix
    I  inputs of an expert's matrix
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.gemm.experts.choose import Rows
from ridgeline.kernels.gemm.experts.forms import Form, e2m1, form_of, load_scales, tensors
from ridgeline.kernels.gemm.experts.matrices import Quantized, dequantized, part, shape_of
from ridgeline.kernels.gemm.experts.packed import TILE, Packed
from ridgeline.kernels.gemm.experts.rows_quantized import down_quantized_rows_kernel, gate_up_quantized_rows_kernel
from ridgeline.kernels.gemm.experts.tiles import dequantized as dequantized_block
from ridgeline.kernels.gemm.route.op import Routes

PIECE = 256 << 20  # bytes of widened matrices at a time, at least one expert's


def gate_up_rows(
    plan: Rows, x_TM: Tensor, weight: Quantized, bias_EG: Tensor | None, routes: Routes, gate: str
) -> Tensor:
    """Compute `op.grouped_gate_up` for a few tokens."""
    (experts, height, width), pairs, form = shape_of(weight), len(routes.token_P), _form(weight)
    inner = height // 2
    y_PF = torch.empty(pairs, inner, dtype=x_TM.dtype, device=x_TM.device)
    gate_up_quantized_rows_kernel[(triton.cdiv(inner, plan.rows), pairs)](
        x_TM, *tensors(weight), x_TM if bias_EG is None else bias_EG, routes.expert_TK, routes.place_TK, y_PF,
        x_TM.stride(0), M=width, F=inner, E=experts, K=routes.expert_TK.shape[1], ROWS=plan.rows, BLOCK=plan.block,
        RUN=form.run, PER=form.per_byte, **form.constants(), BIAS=bias_EG is not None, GATE=gate,
        num_warps=plan.warps, **launch_options(x_TM.device),
    )  # fmt: skip
    return y_PF


def down_rows(
    plan: Rows, h_PF: Tensor, weight: Quantized, bias_EM: Tensor | None, routes: Routes, add_TM: Tensor | None
) -> Tensor:
    """Compute `op.grouped_down` for a few tokens."""
    (tokens, used), (experts, width, inner), form = routes.expert_TK.shape, shape_of(weight), _form(weight)
    y_TM = torch.empty(tokens, width, dtype=h_PF.dtype, device=h_PF.device)
    add = h_PF if add_TM is None else add_TM
    down_quantized_rows_kernel[(triton.cdiv(width, plan.rows), tokens)](
        h_PF, *tensors(weight), h_PF if bias_EM is None else bias_EM, routes.expert_TK, routes.weight_TK,
        routes.place_TK, add, y_TM, add.stride(0), F=inner, M=width, E=experts, K=used,
        CHOICES=triton.next_power_of_2(used), ROWS=plan.rows, BLOCK=plan.block, RUN=form.run, PER=form.per_byte,
        **form.constants(), BIAS=bias_EM is not None, ADD=add_TM is not None, num_warps=plan.warps,
        **launch_options(h_PF.device),
    )  # fmt: skip
    return y_TM


def _form(weight: Quantized) -> Form:
    form = form_of(weight)
    assert form is not None, f"no kernel reads {weight.format}"
    return form


def widened(
    weight: Quantized, bias_EO: Tensor | None, routes: Routes, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor | None, Routes]]:
    """Yield (plain matrices, biases, routes) of some experts after others, until all have come. The matrices lie in one
    scratch, so what reads them must be launched before the next piece is asked for."""
    experts, outputs, inputs = shape_of(weight)
    most = max(1, PIECE // (outputs * inputs * dtype.itemsize))
    each = next(n for n in range(min(most, experts), 0, -1) if experts % n == 0)
    scratch_EOI = torch.empty(each, outputs, inputs, dtype=dtype, device=routes.token_P.device)
    for first in range(0, experts, each):
        some = slice(first, first + each)
        _widen(part(weight, some), scratch_EOI)
        starts = routes.start_E1[first : first + each + 1]
        yield scratch_EOI, None if bias_EO is None else bias_EO[some], routes._replace(start_E1=starts)


def _widen(weight: Quantized, y_EOI: Tensor) -> None:
    """Write matrices in the dtype of `y_EOI`."""
    form, (experts, outputs, inputs) = form_of(weight), y_EOI.shape
    if isinstance(weight, Packed):
        factor = weight.scale_OG if weight.scale is None else weight.scale
        unpack_kernel[(inputs // TILE, experts * outputs // TILE)](
            weight.code_OB.view(torch.int16), weight.scale_OG, factor if weight.zero_OG is None else weight.zero_OG,
            factor, y_EOI, O=outputs, I=inputs, GROUP=weight.format.group, LEVELS=weight.format.values == "levels",
            ZEROS=weight.zero_OG is not None, FACTOR=weight.scale is not None, num_warps=4,
        )  # fmt: skip
        return
    if form is None:
        for expert in range(experts):
            y_EOI[expert] = dequantized(weight, expert)
        return
    # Without dependent launch: products that still read the scratch must have ended
    widen_kernel[(triton.cdiv(outputs, 32), experts)](
        *tensors(weight), y_EOI, O=outputs, I=inputs, ROWS=32, BLOCK=128, **form.constants(), num_warps=4
    )


@triton.jit
def widen_kernel(
    weight_ptr, scale_ptr, zero_ptr, factor_ptr, y_ptr,
    O: tl.constexpr, I: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,  # noqa: E741
    GROUP: tl.constexpr, SPAN: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, FACTOR: tl.constexpr,
    LIFT: tl.constexpr,
):  # fmt: skip
    """Write ROWS rows of one expert's matrix. Grid (tiles of O, experts)."""
    expert = tl.program_id(1).to(tl.int64)
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept_R1 = (row_R < O)[:, None]
    row_R = tl.minimum(row_R, O - 1)
    input_1B = tl.arange(0, BLOCK)[None, :]
    for start in range(0, I, BLOCK):
        w_RB = dequantized_block(
            weight_ptr, scale_ptr, zero_ptr, expert, row_R, start, O, I, BLOCK, tl.float32, KIND, GROUP, SPAN, SCALES,
            ZEROS, LIFT,
        )  # fmt: skip
        if FACTOR:
            w_RB *= tl.load(factor_ptr + expert)
        at = (expert * O + row_R)[:, None] * I + start + input_1B
        tl.store(y_ptr + at, w_RB.to(y_ptr.dtype.element_ty), mask=kept_R1 & (start + input_1B < I))


@triton.jit
def unpack_kernel(
    code_ptr, scale_ptr, zero_ptr, factor_ptr, y_ptr, O: tl.constexpr, I: tl.constexpr,  # noqa: E741
    GROUP: tl.constexpr, LEVELS: tl.constexpr, ZEROS: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Write 64 rows by 64 inputs of matrices in the order of packed.py. Grid (panels, tiles of all experts)."""
    EACH: tl.constexpr = 128 // GROUP  # here, since Triton 3.6 lets an unrolled loop define no constant
    panel, tile = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tile * (I // 64) + panel
    word_at = tl.arange(0, 1024)
    pair, high_row, high = word_at % 2, word_at // 2 % 2, word_at // 4 % 2
    row = word_at // 256 * 16 + high_row * 8 + word_at // 32 % 8
    column = high * 8 + word_at // 8 % 4 * 2 + pair
    word = tl.load(code_ptr + at * 1024 + word_at).to(tl.int32)
    other = tl.load(code_ptr + at * 1024 + (word_at ^ 1)).to(tl.int32)  # of the same register
    factor = 1.0
    if FACTOR:
        factor = tl.load(factor_ptr + tile * 64 // O)
    for product in tl.static_range(4):
        # The places of bits and of scales are those of packed.py
        if LEVELS:
            scale_at = (tile * (I // 128) + panel // 2) * (64 * EACH) + (word_at // 32 * 2 + high_row) * EACH
            scale_at += panel % 2 * (EACH - 1)
            scale = tl.load(scale_ptr + scale_at).to(tl.float32)
            zero = 8
            if ZEROS:
                zero = tl.load(zero_ptr + scale_at).to(tl.int32)
            value = ((word >> 4 * product & 15) - zero).to(tl.float32)
        else:
            scale_at = at * 128 + word_at // 32 * 4 + high_row * 2
            magnitude = word >> (10 if product == 3 else 6 if product == 0 else 24 - 12 * product)
            if product == 3:
                magnitude = (magnitude & 3) | (word >> 2 & 4)
            signed = other if product % 2 else word
            sign = signed >> (15 if product == 0 else 5 if product == 1 else 9 if product == 2 else 3)
            code = (magnitude & 7) | ((sign & 1) << 3)
            scale = load_scales(scale_ptr + scale_at + product // 2, None, "e8m0") * 9.223372036854775808e18  # 2^63
            value = e2m1(code, 0) * 9.223372036854775808e18
        to = (tile * 64 + row) * I + panel * 64 + product * 16 + column
        tl.store(y_ptr + to, (value * scale * factor).to(y_ptr.dtype.element_ty))


def _aot() -> AotKernel:
    form = Form("e2m1", 32, scales="e8m0")
    signature = {"weight_ptr": "*u8", "scale_ptr": "*u8", "zero_ptr": "*u8", "factor_ptr": "*fp32", "y_ptr": "*bf16"}
    shape = {"O": 5760, "I": 2880, "ROWS": 32, "BLOCK": 128} | form.constants()
    return AotKernel(widen_kernel, signature, shape, num_warps=4, hot=True, archs=ONE_OF_EACH)


def _aot_unpack(levels: bool) -> AotKernel:
    scale, group = ("*fp16", 128) if levels else ("*u8", 32)
    signature = {"code_ptr": "*i16", "scale_ptr": scale, "zero_ptr": "*u8", "factor_ptr": "*fp32", "y_ptr": "*bf16"}
    shape = {
        "O": 5760,
        "I": 2944 if levels else 2880,
        "GROUP": group,
        "LEVELS": levels,
        "ZEROS": False,
        "FACTOR": False,
    }
    return AotKernel(unpack_kernel, signature, shape, num_warps=4, hot=True, archs=("sm_90",))


AOT = (_aot(), _aot_unpack(False), _aot_unpack(True))
