"""RMSNorm with gradients in two kernels: the residual addition and the norm forward; backward one pass that reads the
gradients and the sum once, and adds up the weight's gradient for a share of the rows.

Under autocast y has the type of products, so that these need no copy of it; the sum keeps the wider type of x and the
residual. The legend is that of op.py, and R is the rows of a program.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import num_multiprocessors
from ridgeline.kernels.base.rooms import roomy
from ridgeline.kernels.small.norm.library_ops import differentiated
from ridgeline.kernels.small.norm.triton import config

SHARES = 4  # programs of the backward pass for each multiprocessor


@triton.jit
def _training_norm(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, rows, y_row, eps,
    M: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Compute y, whose rows lie y_row apart, and, with a residual, the sum. All other rows are dense."""
    column = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    mask = (column < M) & (row < rows)
    s = tl.load(x_ptr + row * M + column, mask=mask, other=0).to(tl.float32)
    if RESIDUAL:
        s += tl.load(residual_ptr + row * M + column, mask=mask, other=0).to(tl.float32)
        kept = s.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * M + column, kept, mask=mask)
        s = kept.to(tl.float32)
    scale = tl.rsqrt(tl.sum(s * s, 1) / M + eps)[:, None]
    weight = tl.load(weight_ptr + column, mask=column < M, other=0).to(tl.float32)
    tl.store(y_ptr + row * y_row + column, (s * scale * weight).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _training_norm_gradient(
    sum_ptr, weight_ptr, dy_ptr, ds_ptr, dx_ptr, narrow_ptr, dweight_ptr, rows, each, ds_row, dx_row,
    narrow_row, eps,
    M: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SUMMED: tl.constexpr, LEARNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the sum, and a share of the weight's. each: tiles of rows of a program. SUMMED: the sum
    has a gradient of its own. narrow: the gradient of the sum once more, in another type, or None."""
    column = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < M, other=0).to(tl.float32)
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    first = tl.program_id(0).to(tl.int64) * each * ROWS
    for tile in range(each):
        row = first + tile * ROWS + tl.arange(0, ROWS)[:, None]
        mask = (column < M) & (row < rows)
        s = tl.load(sum_ptr + row * M + column, mask=mask, other=0).to(tl.float32)
        dy = tl.load(dy_ptr + row * M + column, mask=mask, other=0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(s * s, 1) / M + eps)[:, None]
        n = s * scale
        dn = dy * weight
        dx = scale * (dn - n * (tl.sum(dn * n, 1) / M)[:, None])
        if SUMMED:
            dx += tl.load(ds_ptr + row * ds_row + column, mask=mask, other=0).to(tl.float32)
        tl.store(dx_ptr + row * dx_row + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if narrow_ptr is not None:
            tl.store(narrow_ptr + row * narrow_row + column, dx.to(narrow_ptr.dtype.element_ty), mask=mask)
        if LEARNS:
            dweight += dy * n
    if LEARNS:
        tl.store(
            dweight_ptr + tl.program_id(0) * M + tl.arange(0, BLOCK), tl.sum(dweight, 0), mask=tl.arange(0, BLOCK) < M
        )


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        kind, width = x_TM.device.type, x_TM.shape[-1]
        x_TM = x_TM.contiguous()
        residual_TM = None if residual_TM is None else residual_TM.contiguous()
        wide = x_TM.dtype if residual_TM is None else torch.promote_types(x_TM.dtype, residual_TM.dtype)
        narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_TM.dtype
        y_TM = roomy(x_TM.shape, narrow, x_TM.device)
        sum_TM = x_TM if residual_TM is None else torch.empty(x_TM.shape, dtype=wide, device=x_TM.device)
        rows, (block, together, warps) = x_TM.numel() // width, config(width)
        _training_norm[(triton.cdiv(rows, together),)](
            x_TM, residual_TM, weight_M, y_TM, sum_TM, rows, y_TM.stride(-2), eps,
            M=width, BLOCK=block, ROWS=together, RESIDUAL=residual_TM is not None, num_warps=warps,
        )  # fmt: skip
        ctx.save_for_backward(sum_TM, weight_M)
        ctx.eps, ctx.dtypes = eps, (x_TM.dtype, None if residual_TM is None else residual_TM.dtype)
        return (y_TM,) if residual_TM is None else (y_TM, sum_TM)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TM: Tensor | None, ds_TM: Tensor | None = None) -> tuple[Tensor | None, ...]:
        sum_TM, weight_M = ctx.saved_tensors
        of_x, of_residual = ctx.dtypes
        if dy_TM is None:
            return ds_TM, ds_TM, None, None
        device, alone = sum_TM.device, of_x == sum_TM.dtype  # the gradient of x goes to a product
        dx_TM = roomy(sum_TM.shape, of_x, device) if alone else torch.empty_like(sum_TM)
        narrow_TM = None if alone else roomy(sum_TM.shape, of_x, device)
        gradients = dy_TM, ds_TM, dx_TM, narrow_TM
        dweight_M = _gradient(sum_TM, weight_M, gradients, ctx.eps, learns=ctx.needs_input_grad[2])
        return (
            dx_TM if narrow_TM is None else narrow_TM,
            None if of_residual is None else dx_TM.to(of_residual),
            dweight_M,
            None,
        )


def _gradient(
    sum_TM: Tensor,
    weight_M: Tensor,
    gradients: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    eps: float,
    *,
    learns: bool,
) -> Tensor | None:
    """Fill in the gradient of the sum, and return that of the weight, if it learns. gradients: of y and of the sum
    itself, and where that of the sum goes, once in its own type and, if not None, in another."""
    dy_TM, ds_TM, dx_TM, narrow_TM = gradients
    width = sum_TM.shape[-1]
    rows, (block, together, warps) = sum_TM.numel() // width, config(width)
    tiles = triton.cdiv(rows, together)
    each = triton.cdiv(tiles, SHARES * num_multiprocessors(sum_TM.device)) if learns else 1
    programs = triton.cdiv(tiles, each)
    if ds_TM is not None and (ds_TM.ndim != 2 or ds_TM.stride(1) != 1):
        ds_TM = ds_TM.contiguous()
    dweight_RM = torch.empty(programs, width, device=sum_TM.device) if learns else None
    _training_norm_gradient[(programs,)](
        sum_TM, weight_M, dy_TM.contiguous(), ds_TM, dx_TM, narrow_TM, dweight_RM, rows, each,
        *(0 if x is None else x.stride(-2) for x in (ds_TM, dx_TM, narrow_TM)), eps,
        M=width, BLOCK=block, ROWS=together, SUMMED=ds_TM is not None, LEARNS=learns, num_warps=warps,
    )  # fmt: skip
    return None if dweight_RM is None else dweight_RM.sum(0).to(weight_M.dtype)


def rms_norm_gradient(
    dy_TM: Tensor, ds_TM: Tensor | None, sum_TM: Tensor, weight_M: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute `gradient.rms_norm_gradient`."""
    dx_TM = torch.empty(sum_TM.shape, dtype=sum_TM.dtype, device=sum_TM.device)
    width = sum_TM.shape[-1]
    dy, dx = dy_TM.reshape(-1, width), dx_TM.view(-1, width)
    ds = None if ds_TM is None else ds_TM.reshape(-1, width)
    dweight_M = _gradient(sum_TM.reshape(-1, width), weight_M, (dy, ds, dx, None), eps, learns=True)
    assert dweight_M is not None
    return dx_TM, dweight_M


def rms_norm(x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `op.rms_norm`, with gradients. In a compiled graph it is a registered op."""
    if torch.compiler.is_compiling():
        return differentiated(x_TM, residual_TM, weight_M, eps)
    found: tuple[Tensor, ...] = _Norm.apply(x_TM, residual_TM, weight_M, eps)
    return found[0], x_TM if residual_TM is None else found[1]


def _aot(*, backward: bool) -> AotKernel:
    block, together, warps = config(2048)
    constants: dict[str, Any] = {"M": 2048, "BLOCK": block, "ROWS": together}
    if backward:
        signature = {"sum_ptr": "*fp32", "weight_ptr": "*fp32", "dy_ptr": "*bf16", "ds_ptr": "*fp32", "dx_ptr": "*fp32"}
        signature |= {"narrow_ptr": "*bf16", "dweight_ptr": "*fp32", "rows": "i32", "each": "i32"}
        signature |= dict.fromkeys(("ds_row", "dx_row", "narrow_row"), "i32:16") | {"eps": "fp32"}
        return AotKernel(
            _training_norm_gradient,
            signature,
            constants | {"SUMMED": True, "LEARNS": True},
            num_warps=warps,
            archs=ONE_OF_EACH,
        )
    signature = {"x_ptr": "*bf16", "residual_ptr": "*fp32", "weight_ptr": "*fp32", "y_ptr": "*bf16", "sum_ptr": "*fp32"}
    signature |= {"rows": "i32", "y_row": "i32:16", "eps": "fp32"}
    return AotKernel(_training_norm, signature, constants | {"RESIDUAL": True}, num_warps=warps, archs=ONE_OF_EACH)


AOT = (_aot(backward=False), _aot(backward=True))
