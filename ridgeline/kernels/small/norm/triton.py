"""Both norms in one kernel: residual addition, statistics and scaling happen while a row is in registers.

A program takes ROWS rows at once: several if rows are short, as in a norm of heads. The legend is that of op.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.small.norm import torch_ops


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, rows, inner,
    x_outer, x_inner, residual_outer, residual_inner, eps,
    M: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    RESIDUAL: tl.constexpr, CENTRE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalise ROWS rows. Row i of x begins at (i // inner) * x_outer + (i % inner) * x_inner; y and sum are dense.
    BLOCK >= M."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.arange(0, BLOCK)[None, :]
    in_row = column < M
    weight = tl.load(weight_ptr + column, mask=in_row, other=0)
    if CENTRE:
        bias = tl.load(bias_ptr + column, mask=in_row, other=0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    mask = in_row if ROWS == 1 else in_row & (row < rows)
    x = tl.load(x_ptr + (row // inner) * x_outer + (row % inner) * x_inner + column, mask=mask, other=0)
    if RESIDUAL:
        offset = (row // inner) * residual_outer + (row % inner) * residual_inner
        residual = tl.load(residual_ptr + offset + column, mask=mask, other=0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * M + column, x, mask=mask)
    s = x.to(tl.float32)
    if CENTRE:
        s = tl.where(in_row, s - tl.sum(s, 1)[:, None] / M, 0)
    scale = tl.rsqrt(tl.sum(s * s, 1) / M + eps)[:, None]
    y = s * scale * weight.to(tl.float32)
    if CENTRE:
        y += bias.to(tl.float32)
    tl.store(y_ptr + row * M + column, y.to(x.dtype), mask=mask)


def config(width: int) -> tuple[int, int, int]:
    """Return (BLOCK, ROWS, warps). A thread holds 8 or 16 elements of a row, with at most 32 warps. Short rows share a
    program."""
    block = triton.next_power_of_2(width)
    rows = max(1, min(8, 1024 // block))
    return block, rows, max(1, min(32, block * rows // 512))


def _rows(x: Tensor) -> tuple[int, int, int]:
    """Return (inner, outer stride, inner stride) of a tensor's rows. More than two leading dimensions must be dense."""
    if x.ndim == 1:
        return 1, 0, 0
    if x.ndim == 2:
        return 1, x.stride(0), 0
    if x.ndim == 3:
        return x.shape[1], x.stride(0), x.stride(1)
    return 1, x.shape[-1], 0


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    if x.ndim > 3:
        x = x.contiguous()
        residual = None if residual is None else residual.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.numel() // width
    inner, x_outer, x_inner = _rows(x)
    _, residual_outer, residual_inner = _rows(x if residual is None else residual)
    block, together, warps = config(width)
    _norm[(triton.cdiv(rows, together),)](
        x, residual, weight, bias, y, total, rows, inner, x_outer, x_inner, residual_outer, residual_inner, eps,
        M=width, BLOCK=block, ROWS=together, RESIDUAL=residual is not None, CENTRE=bias is not None,
        num_warps=warps, **launch_options(x.device),
    )  # fmt: skip
    return y, total


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def rms_norm(x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `op.rms_norm`. If a gradient is wanted, torch's own kernels run, since these have none."""
    if _needs_gradient(x_TM, residual_TM, weight_M):
        return torch_ops.rms_norm(x_TM, residual_TM, weight_M, eps)
    return _launch(x_TM, residual_TM, weight_M, None, eps)


def layer_norm(
    x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, bias_M: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute `op.layer_norm`. If a gradient is wanted, torch's own kernels run, since these have none."""
    if _needs_gradient(x_TM, residual_TM, weight_M, bias_M):
        return torch_ops.layer_norm(x_TM, residual_TM, weight_M, bias_M, eps)
    return _launch(x_TM, residual_TM, weight_M, bias_M, eps)


def _aot(width: int, *, residual: bool, layer: bool = False) -> AotKernel:
    signature = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "bias_ptr", "y_ptr", "sum_ptr"), "*bf16")
    signature |= {"rows": "i32", "inner": "i32"}
    signature |= dict.fromkeys(("x_outer", "x_inner", "residual_outer", "residual_inner"), "i32:16") | {"eps": "fp32"}
    block, together, warps = config(width)
    constants = {"M": width, "BLOCK": block, "ROWS": together, "RESIDUAL": residual, "CENTRE": layer, "inner": 1}
    absent = (() if residual else ("residual_ptr",)) + (() if layer else ("bias_ptr",))
    for name in (*absent, "inner"):
        del signature[name]
    return AotKernel(_norm, signature, constants | dict.fromkeys(absent), num_warps=warps, hot=True, archs=ONE_OF_EACH)


AOT = (
    _aot(2048, residual=True),
    _aot(4096, residual=True),
    _aot(128, residual=False),
    _aot(768, residual=True, layer=True),
)
