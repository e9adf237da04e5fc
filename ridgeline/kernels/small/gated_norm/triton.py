"""The gated norm in one kernel. A program takes some groups at once. The legend is that of op.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.small.gated_norm.op import gate_of


@triton.jit(do_not_specialize=["rows"])
def _gated_norm(
    x_ptr, z_ptr, weight_ptr, y_ptr, rows, inner, x_outer, x_inner, z_outer, z_inner, eps,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    BEFORE: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalise ROWS groups of GROUP numbers. Vector i of x begins at (i // inner) · x_outer + (i % inner) · x_inner
    and has GROUPS groups; y is dense. BLOCK >= GROUP."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    number = tl.arange(0, BLOCK)[None, :]
    mask = (number < GROUP) & (row < rows)
    vector, column = row // GROUPS, (row % GROUPS) * GROUP + number
    outer, within = vector // inner, vector % inner
    x = tl.load(x_ptr + outer * x_outer + within * x_inner + column, mask=mask, other=0).to(tl.float32)
    z = tl.load(z_ptr + outer * z_outer + within * z_inner + column, mask=mask, other=0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0).to(tl.float32)
    gate = 1 / (1 + tl.exp(-z))
    if SILU:
        gate = z * gate
    if not BEFORE:
        x = x * gate
    y = x * tl.rsqrt(tl.sum(x * x, 1) / GROUP + eps)[:, None] * weight
    if BEFORE:
        y = y * gate
    tl.store(y_ptr + row * GROUP + number, y.to(y_ptr.dtype.element_ty), mask=mask)


def config(group: int, rows: int) -> tuple[int, int, int]:
    """Return (BLOCK, ROWS, warps). A thread holds eight or more numbers of a group. Short groups share a program, of
    which a few hundred are left for a GPU to have."""
    block = triton.next_power_of_2(group)
    together = max(1, min(2048 // block, triton.next_power_of_2(rows // 512 + 1)))
    return block, together, max(1, min(16, block * together // 256))


def gated_norm(
    x_TM: Tensor, z_TM: Tensor, weight_M: Tensor, eps: float, group: int, norm_before_gate: bool, gate: str = "silu"
) -> Tensor:
    gate_of(gate)
    width = x_TM.shape[-1]
    if x_TM.ndim > 3:
        x_TM, z_TM = x_TM.contiguous(), z_TM.contiguous()
    y_TM = torch.empty(x_TM.shape, dtype=x_TM.dtype, device=x_TM.device)
    groups, rows = width // group, x_TM.numel() // group
    inner = x_TM.shape[1] if x_TM.ndim == 3 else 1
    (x_outer, x_inner), (z_outer, z_inner) = (
        (x.stride(0), x.stride(1)) if x.ndim == 3 else (x.stride(0) if x.ndim == 2 else width, 0) for x in (x_TM, z_TM)
    )
    block, together, warps = config(group, rows)
    _gated_norm[(triton.cdiv(rows, together),)](
        x_TM, z_TM, weight_M, y_TM, rows, inner, x_outer, x_inner, z_outer, z_inner, eps,
        GROUP=group, GROUPS=groups, BLOCK=block, ROWS=together, BEFORE=norm_before_gate, SILU=gate == "silu",
        num_warps=warps, **launch_options(x_TM.device),
    )  # fmt: skip
    return y_TM


def _aot(width: int, group: int, before: bool) -> AotKernel:
    types = dict.fromkeys(("x_ptr", "z_ptr", "weight_ptr", "y_ptr"), "*bf16") | {"rows": "i32", "inner": "i32:16"}
    types |= dict.fromkeys(("x_outer", "x_inner", "z_outer", "z_inner"), "i32:16") | {"eps": "fp32"}
    block, together, warps = config(group, 64 * width // group)
    constants = {"GROUP": group, "GROUPS": width // group, "BLOCK": block, "ROWS": together}
    constants |= {"BEFORE": before, "SILU": True}
    return AotKernel(_gated_norm, types, constants, num_warps=warps, hot=True, archs=ONE_OF_EACH)


AOT = (_aot(128, 128, True), _aot(8192, 1024, False))
