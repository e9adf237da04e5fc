"""Columns of x in the order of places, in which warpgroups read them: alone, or behind a norm in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.launch import launch_options


@triton.jit
def _source(place, SPAN: tl.constexpr):
    """Return the pair of columns that stands at each place of pairs."""
    within = place % (SPAN // 2)
    return place - within + within % 4 * (SPAN // 8) + within // 4


@triton.jit
def places_kernel(x_ptr, y_ptr, x_stride, width, size, SPAN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Put the columns of x, taken as pairs (int32), in the order of places: y [T, I / 2]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, place = at // width, at % width
    x = tl.load(x_ptr + token.to(tl.int64) * x_stride + _source(place, SPAN), mask=at < size, other=0)
    tl.store(y_ptr + at, x, mask=at < size)


@triton.jit
def norm_places_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, s_ptr, x_stride, residual_stride, inputs, eps,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalise a row, after a residual is added: s [T, I] in the order of columns, y [T, I] in that of places."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.arange(0, BLOCK)
    mask = place < inputs
    column = _source(place // 2, SPAN) * 2 + place % 2
    weight = tl.load(weight_ptr + column, mask=mask, other=0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    s = tl.load(x_ptr + token * x_stride + column, mask=mask, other=0)
    if RESIDUAL:
        residual = tl.load(residual_ptr + token * residual_stride + column, mask=mask, other=0)
        s = (s.to(tl.float32) + residual.to(tl.float32)).to(s.dtype)
        tl.store(s_ptr + token * inputs + column, s, mask=mask)
    number = s.to(tl.float32)
    y = number * tl.rsqrt(tl.sum(number * number, 0) / inputs + eps) * weight
    tl.store(y_ptr + token * inputs + place, y.to(s.dtype), mask=mask)


def in_places(x_TI: Tensor, span: int) -> Tensor:
    """Return x with its columns in the order of places. Numbers of 16 bits, next to each other in a row."""
    if x_TI.stride(0) % 2 or x_TI.storage_offset() % 2:
        x_TI = x_TI.clone(memory_format=torch.contiguous_format)
    y_TI = torch.empty(x_TI.shape, dtype=x_TI.dtype, device=x_TI.device)
    x, y = x_TI.view(torch.int32), y_TI.view(torch.int32)
    places_kernel[(triton.cdiv(y.numel(), 1024),)](
        x, y, x.stride(0), y.shape[1], y.numel(), SPAN=span, BLOCK=1024, num_warps=4, **launch_options(x.device)
    )
    return y_TI


def norm_in_places(
    x_TI: Tensor, residual_TI: Tensor | None, weight_I: Tensor, eps: float, span: int
) -> tuple[Tensor, Tensor]:
    """Return (the norm of x + residual in the order of places, x + residual)."""
    tokens, inputs = x_TI.shape
    y_TI = torch.empty(tokens, inputs, dtype=x_TI.dtype, device=x_TI.device)
    s_TI = x_TI if residual_TI is None else torch.empty_like(y_TI)
    residual = x_TI if residual_TI is None else residual_TI
    block = triton.next_power_of_2(inputs)
    norm_places_kernel[(tokens,)](
        x_TI, residual, weight_I, y_TI, s_TI, x_TI.stride(0), residual.stride(0), inputs, eps, SPAN=span, BLOCK=block,
        RESIDUAL=residual_TI is not None, num_warps=max(1, min(16, block // 512)), **launch_options(x_TI.device),
    )  # fmt: skip
    return y_TI, s_TI


_POINTERS = {"x_ptr": "*bf16", "residual_ptr": "*bf16", "weight_ptr": "*bf16", "y_ptr": "*bf16", "s_ptr": "*bf16"}
AOT = (
    AotKernel(
        places_kernel,
        {"x_ptr": "*i32", "y_ptr": "*i32", "x_stride": "i32:16", "width": "i32:16", "size": "i32:16"},
        {"SPAN": 32, "BLOCK": 1024},
        hot=True,
        archs=("sm_90",),
    ),
    AotKernel(
        norm_places_kernel,
        _POINTERS | {"x_stride": "i32:16", "residual_stride": "i32:16", "inputs": "i32:16", "eps": "fp32"},
        {"SPAN": 32, "BLOCK": 4096, "RESIDUAL": True},
        num_warps=8,
        hot=True,
        archs=("sm_90",),
    ),
)
