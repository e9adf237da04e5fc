"""Weights in codes → weights in 16 bits, for products that the library computes, on any GPU and for both orders of
codes. Columns stay in the order of the codes.

Legend:
    R  rows of a program
    G  groups, or parts of groups, of a block of 128 inputs
    I  inputs of one of these
"""

from __future__ import annotations

from functools import cache
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.base.weight_format import CodedFormat
from ridgeline.kernels.gemm.codes.fragments import Fragments, span, unit
from ridgeline.kernels.gemm.codes.op import Q4_K, TABLES, W4, Coded

ROWS, BLOCK = 16, 128


@triton.jit
def _code(
    code_ptr, row, column, inputs, first: tl.constexpr, LOW: tl.constexpr, BITS: tl.constexpr, TOTAL: tl.constexpr,
    UNIT: tl.constexpr, SPAN: tl.constexpr, SIGNED: tl.constexpr, mask,
):  # fmt: skip
    """Return a plane's part of the codes, shifted to its place.

    first: bits of the planes before this one. TOTAL: bits of all. UNIT: 0 if codes lie row by row.
    """
    if UNIT == 0:
        start = inputs * first // 8
        byte = tl.load(code_ptr + row * (inputs * TOTAL // 8) + start + column * BITS // 8, mask=mask, other=0)
        return (byte.to(tl.int32) >> column * BITS % 8 & (1 << BITS) - 1) << LOW
    each: tl.constexpr = 16 // BITS  # codes of a word
    place = column % SPAN
    run = place // (SPAN // 4)
    place = place % (SPAN // 4)
    slice = column % UNIT // SPAN * (SPAN // 16) + place // 4
    column_at = (
        column // UNIT * (UNIT * TOTAL) + UNIT * first + slice // each * 256 + run * 8 + place % 4 // 2 * 4 + place % 2
    )
    row_at = row // 16 * (inputs * TOTAL) + row % 8 * 32 + row % 16 // 8 * 2
    word = tl.load(code_ptr.to(tl.pointer_type(tl.uint16)) + row_at + column_at, mask=mask, other=0).to(tl.int32)
    j = slice % each
    if SIGNED:
        return word >> 3 * j & 7 | (word >> 12 + j & 1) << 3
    return (word >> j * BITS & (1 << BITS) - 1) << LOW


@triton.jit
def _scale(pointer, row, group, groups, TOGETHER: tl.constexpr, UNIT: tl.constexpr, mask):
    """Return the numbers of these groups. TOGETHER: groups of a unit."""
    if UNIT == 0:
        at = row * groups + group
    else:
        at = row // 16 * (groups * 16) + group // TOGETHER * (16 * TOGETHER) + row % 16 * TOGETHER + group % TOGETHER
    x = tl.load(pointer + at, mask=mask, other=0.0)
    if x.dtype == tl.uint8:
        bits = x.to(tl.int32) << 23  # E8M0: 0 is 2**-127, and 255 is NaN
        x = tl.where((x == 0) | (x == 255), bits | 0x400000, bits).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def dequantize_kernel(
    code_ptr, scale_ptr, zero_ptr, outer_ptr, outer_minimum_ptr, factor_ptr, table_ptr, weight_ptr, outputs, inputs,
    LOW: tl.constexpr, HIGH: tl.constexpr, VALUES: tl.constexpr, ZEROS: tl.constexpr, NESTED: tl.constexpr,
    GROUP: tl.constexpr, UNIT: tl.constexpr, SPAN: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr,
    FACTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute weight [O, I]. UNIT: 0 if codes lie row by row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # the product before may still read this memory
    WIDTH: tl.constexpr = 128 // COUNT
    TOTAL: tl.constexpr = LOW + HIGH
    TOGETHER: tl.constexpr = UNIT // GROUP if UNIT > GROUP else 1
    row_R11 = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None, None]
    first_1G1 = tl.program_id(1) * 128 + tl.arange(0, COUNT)[None, :, None] * WIDTH
    column = first_1G1 + tl.arange(0, WIDTH)[None, None, :]
    mask = (row_R11 < outputs) & (column < inputs)
    few = (row_R11 < outputs) & (first_1G1 < inputs)
    code = _code(code_ptr, row_R11, column, inputs, 0, 0, LOW, TOTAL, UNIT, SPAN, UNIT > 0 and VALUES == "e2m1", mask)
    if HIGH:
        code |= _code(code_ptr, row_R11, column, inputs, LOW, LOW, HIGH, TOTAL, UNIT, SPAN, False, mask)
    group = first_1G1 // GROUP
    scale = _scale(scale_ptr, row_R11, group, inputs // GROUP, TOGETHER, UNIT, few)
    if NESTED:
        scale *= _scale(outer_ptr, row_R11, first_1G1 // 256, inputs // 256, 1, UNIT, few)
    if FACTOR:
        scale *= tl.load(factor_ptr)
    value = code.to(tl.float32) if VALUES == "levels" else tl.load(table_ptr + code)
    if ZEROS == "middle":
        if VALUES == "levels":
            value -= 1 << (TOTAL - 1)
        value *= scale
    else:
        # zeros that are whole numbers may be bytes: they are no exponents
        if ZEROS == "levels":
            zero = _scale(zero_ptr.to(tl.pointer_type(tl.int8)), row_R11, group, inputs // GROUP, TOGETHER, UNIT, few)
            value = (value - tl.where(zero < 0, zero + 256, zero)) * scale
        else:
            minimum = _scale(zero_ptr, row_R11, group, inputs // GROUP, TOGETHER, UNIT, few)
            if NESTED:
                minimum *= _scale(outer_minimum_ptr, row_R11, first_1G1 // 256, inputs // 256, 1, UNIT, few)
            value = value * scale - minimum
    tl.store(weight_ptr + row_R11 * inputs + column, value.to(weight_ptr.dtype.element_ty), mask=mask)


def dequantize(weight: Coded, dtype: torch.dtype) -> Tensor:
    """Return the weight in `dtype`: [O, I], with its columns in the order of the codes."""
    outputs, inputs = weight.code_OB.shape[0], weight.inputs
    # New memory each time: a matrix that all calls share would be written over by another stream's call
    weight_OI = torch.empty(outputs, inputs, dtype=dtype, device=weight.code_OB.device)
    some = [weight.code_OB if x is None else x for x in (weight.zero_OG, weight.outer_OS, weight.outer_minimum_OS)]
    dequantize_kernel[(triton.cdiv(outputs, ROWS), triton.cdiv(inputs, BLOCK))](
        weight.code_OB, weight.scale_OG, *some, weight_OI if weight.scale is None else weight.scale,
        _table(weight.format.values, weight_OI.device), weight_OI, outputs, inputs,
        **_constants(weight.format, inputs, isinstance(weight, Fragments)), FACTOR=weight.scale is not None,
        num_warps=4, **launch_options(weight_OI.device),
    )  # fmt: skip
    return weight_OI


def _constants(how: CodedFormat, inputs: int, turned: bool) -> dict[str, Any]:
    low, high = (*how.planes(), 0)[:2]
    group = how.group or inputs
    return {
        "LOW": low, "HIGH": high, "VALUES": how.values, "ZEROS": how.zeros if how.values == "levels" else "middle",
        "NESTED": how.nested, "GROUP": group, "UNIT": unit(how) if turned else 0, "SPAN": span(how),
        "COUNT": BLOCK // gcd(group, BLOCK), "ROWS": ROWS,
    }  # fmt: skip


@cache
def _table(values: str, device: torch.device) -> Tensor:
    return torch.tensor(TABLES.get(values, (0.0,)), device=device)


def _aot(how: CodedFormat, scale: str, turned: bool) -> AotKernel:
    signature = {"code_ptr": "*u8", "scale_ptr": scale, "zero_ptr": scale, "outer_ptr": "*fp16"}
    signature |= {"outer_minimum_ptr": "*fp16", "factor_ptr": "*fp32", "table_ptr": "*fp32", "weight_ptr": "*bf16"}
    constants = _constants(how, 4096, turned) | {"FACTOR": False}
    return AotKernel(
        dequantize_kernel, signature | {"outputs": "i32:16", "inputs": "i32:16"}, constants, hot=True,
        archs=ONE_OF_EACH,
    )  # fmt: skip


AOT = (_aot(W4, "*fp16", True), _aot(Q4_K, "*i8", False))
