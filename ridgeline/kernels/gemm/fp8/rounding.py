"""Activations rounded to 8 bits in one kernel, with the residual addition and the norm before it if there are any.

A program takes one row. The rounding is that of op.round_activations for E4M3, and that of gemm/int8/op.py for int8.
Scales are at least 1e-30, so rows with smaller numbers than that are rounded coarsely, and rows of zeros need no case.

Legend:
    T  tokens
    I  inputs
    C  blocks of 128 inputs
    B  inputs of a block
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.base.weight_format import BLOCK, Activations, Fp8Format
from ridgeline.kernels.gemm.fp8.saturation import saturations
from ridgeline.kernels.gemm.plain.op import Operand
from ridgeline.kernels.gemm.plain.rounded import Rounded, group_scales

GROUP = tl.constexpr(BLOCK)
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


@triton.jit
def _load(ptr, at, mask):
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def round_kernel(
    x_ptr, residual_ptr, norm_ptr, x_scale_ptr, q_ptr, scale_ptr, s_ptr, saturated_ptr,
    x_stride, residual_stride, tokens, eps,
    inputs: tl.constexpr, GROUPS: tl.constexpr, MODE: tl.constexpr, LARGEST: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Round a row of x, or of rms_norm(x + residual).

    GROUPS: at least the number of blocks, a power of two.
    MODE: "token", "block" or "static".
    saturated: a counter of the numbers that a static scale cuts off.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    group_C1 = tl.arange(0, GROUPS)[:, None]
    at_CB = group_C1 * GROUP + tl.arange(0, GROUP)[None, :]
    mask_CB = at_CB < inputs
    if NORM:
        norm_CB = _load(norm_ptr, at_CB, mask_CB)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x_CB = tl.load(x_ptr + row * x_stride + at_CB, mask=mask_CB, other=0.0)
    if RESIDUAL:
        residual_CB = _load(residual_ptr, row * residual_stride + at_CB, mask_CB)
        x_CB = (x_CB.to(tl.float32) + residual_CB).to(x_CB.dtype)
        tl.store(s_ptr + row * inputs + at_CB, x_CB, mask=mask_CB)
    v_CB = x_CB.to(tl.float32)
    if NORM:
        v_CB *= tl.rsqrt(tl.sum(tl.sum(v_CB * v_CB, 1), 0) / inputs + eps) * norm_CB
    if MODE == "static":
        scale = tl.load(x_scale_ptr)
        tl.store(scale_ptr + row, scale)
    elif MODE == "block":
        scale = tl.maximum(tl.max(tl.abs(v_CB), 1) * (1 / LARGEST), 1e-30)[:, None]
        tl.store(scale_ptr + group_C1.to(tl.int64) * tokens + row, scale, mask=group_C1 * GROUP < inputs)
    else:
        scale = tl.maximum(tl.max(tl.max(tl.abs(v_CB), 1), 0) * (1 / LARGEST), 1e-30)
        tl.store(scale_ptr + row, scale)
    v_CB = v_CB * (1 / scale)
    if MODE == "static":
        cut = tl.sum(tl.sum((tl.abs(v_CB) > LARGEST).to(tl.int32), 1), 0)
        if cut > 0:
            tl.atomic_add(saturated_ptr, cut.to(tl.int64), sem="relaxed")
    if LARGEST == 127:
        v_CB = tl.floor(v_CB + 0.5)  # halves are rounded up
    every: tl.constexpr = tl.PropagateNan.ALL
    v_CB = tl.minimum(tl.maximum(v_CB, -LARGEST, propagate_nan=every), LARGEST, propagate_nan=every)
    tl.store(q_ptr + row * inputs + at_CB, v_CB.to(q_ptr.dtype.element_ty), mask=mask_CB)


def round_rows(
    x: Operand, dtype: torch.dtype, activations: Activations, x_scale: Tensor | None = None
) -> tuple[Rounded, Tensor]:
    """Return (the operand rounded, and s)."""
    (tokens, inputs), device = x.x_TI.shape, x.x_TI.device
    q_TI, grouped = torch.empty(tokens, inputs, dtype=dtype, device=device), activations == "block"
    scale = group_scales(tokens, inputs, device) if grouped else torch.empty(tokens, dtype=torch.float32, device=device)
    rounded = Rounded(q_TI, scale, x.x_TI.dtype)
    return rounded, _launch(rounded, x, activations, x_scale)


def norm_fp8(
    x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float, fp8: Fp8Format
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `library_ops.norm_fp8` in one kernel."""
    activations: Activations = "block" if fp8.block else "token"
    rounded, s_TM = round_rows(Operand(x_TM, residual_TM, weight_M, eps), torch.float8_e4m3fn, activations)
    return rounded.q_TI, rounded.scale, s_TM


def round_into(x_TI: Tensor, buffer: Rounded) -> None:
    """Round x into `buffer`, with a scale for each 128 inputs."""
    _launch(buffer, Operand(x_TI), "block", None)


def _launch(buffer: Rounded, x: Operand, activations: Activations, x_scale: Tensor | None) -> Tensor:
    """Round the operand into `buffer`, and return s."""
    (x_TI, residual_TI, norm_weight_I, eps), (q_TI, scale, _) = x, buffer
    tokens, inputs = x_TI.shape
    s_TI = x_TI if residual_TI is None else torch.empty(tokens, inputs, dtype=x_TI.dtype, device=x_TI.device)
    if not tokens:
        return s_TI
    padded = triton.next_power_of_2(triton.cdiv(inputs, BLOCK))
    residual = x_TI if residual_TI is None else residual_TI  # any pointer will do for what the flags leave out
    round_kernel[(tokens,)](
        x_TI, residual, x_TI if norm_weight_I is None else norm_weight_I, scale if x_scale is None else x_scale,
        q_TI, scale, s_TI, saturations(x_TI.device) if activations == "static" else scale, x_TI.stride(0),
        residual.stride(0), tokens, eps, inputs=inputs, GROUPS=padded, MODE=activations, LARGEST=LARGEST[q_TI.dtype],
        NORM=norm_weight_I is not None, RESIDUAL=residual_TI is not None, num_warps=_warps(padded),
        **launch_options(x_TI.device),
    )  # fmt: skip
    return s_TI


def _warps(groups: int) -> int:
    """Return the warps of a program: a thread holds 8 to 16 numbers of a row, and more only if the row is very long."""
    return max(1, min(16 if groups <= 64 else 32, groups // 4))


def _aot(inputs: int, mode: str, kind: str, *, norm: bool) -> AotKernel:
    signature = dict.fromkeys(("x_ptr", "residual_ptr", "norm_ptr"), "*bf16") | {"x_scale_ptr": "*fp32"}
    signature |= {"q_ptr": f"*{kind}", "scale_ptr": "*fp32", "s_ptr": "*bf16", "saturated_ptr": "*i64"}
    signature |= dict.fromkeys(("x_stride", "residual_stride"), "i32:16") | {"tokens": "i32", "eps": "fp32"}
    groups = triton.next_power_of_2(triton.cdiv(inputs, BLOCK))
    named = {"inputs": inputs, "GROUPS": groups, "MODE": mode, "LARGEST": 127.0 if kind == "i8" else 448.0}
    flags = {"NORM": norm, "RESIDUAL": norm}
    archs = ("sm_90", "gfx942")
    return AotKernel(round_kernel, signature, named | flags, num_warps=_warps(groups), hot=True, archs=archs)


AOT = (
    _aot(4096, "token", "fp8e4nv", norm=True),
    _aot(14_336, "block", "fp8e4nv", norm=False),
    _aot(14_336, "static", "fp8e4nv", norm=False),
    _aot(4096, "token", "i8", norm=True),
)
