"""Gated activations with gradients: the forward kernel, and one that computes both halves' gradients from the inputs.
The legend is that of op.py."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.rooms import roomy
from ridgeline.kernels.small.activation import gradient, library_ops, torch_ops
from ridgeline.kernels.small.activation.triton import KINDS, activate, config, gated


@triton.jit
def slope(x, KIND: tl.constexpr):
    """Return the derivative of `activate`."""
    if KIND == "silu":
        s = tl.sigmoid(x)
        d = s * (1 + x * (1 - s))
    elif KIND == "gelu":
        d = 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == "relu":
        d = tl.where(x > 0, 1.0, 0.0)
    elif KIND == "relu2":
        d = 2 * tl.maximum(x, 0.0)
    else:
        tl.static_assert(KIND == "gelu_tanh")
        # x sigmoid(2u), and the derivative of 2u is 1.596 (1 + 3 * 0.044715 x^2)
        s = tl.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))
        d = s + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    return d


@triton.jit
def _training_gate(x_ptr, y_ptr, y_row, F: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """Compute y, whose rows lie y_row apart; those of x are dense."""
    blocks: tl.constexpr = (F + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < F
    gate = tl.load(x_ptr + row * 2 * F + column, mask=mask, other=0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + column, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + row * y_row + column, gated(gate, up, KIND).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _training_gate_gradient(x_ptr, dy_ptr, dx_ptr, dx_row, F: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr):
    blocks: tl.constexpr = (F + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < F
    gate = tl.load(x_ptr + row * 2 * F + column, mask=mask, other=0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + column, mask=mask, other=0).to(tl.float32)
    dy = tl.load(dy_ptr + row * F + column, mask=mask, other=0).to(tl.float32)
    dtype = dx_ptr.dtype.element_ty
    tl.store(dx_ptr + row * dx_row + column, (dy * up * slope(gate, KIND)).to(dtype), mask=mask)
    tl.store(dx_ptr + row * dx_row + F + column, (dy * activate(gate, KIND)).to(dtype), mask=mask)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_T2F: Tensor, kind: str) -> Tensor:
        x_T2F = x_T2F.contiguous()
        ctx.save_for_backward(x_T2F)
        ctx.kind = kind
        width = x_T2F.shape[-1] // 2
        rows, y_TF = x_T2F.numel() // (2 * width), roomy((*x_T2F.shape[:-1], width), x_T2F.dtype, x_T2F.device)
        block, warps = config(rows, width)
        _training_gate[(rows * triton.cdiv(width, block),)](
            x_T2F, y_TF, y_TF.stride(-2), F=width, BLOCK=block, KIND=kind, num_warps=warps
        )
        return y_TF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TF: Tensor) -> tuple[Tensor, None]:
        (x_T2F,) = ctx.saved_tensors
        dx_T2F = roomy(x_T2F.shape, x_T2F.dtype, x_T2F.device)
        _gradient(x_T2F, dy_TF, dx_T2F, ctx.kind)
        return dx_T2F, None


def _gradient(x_T2F: Tensor, dy_TF: Tensor, dx_T2F: Tensor, kind: str) -> None:
    """Fill in the gradients of both halves."""
    width = x_T2F.shape[-1] // 2
    rows = x_T2F.numel() // (2 * width)
    block, warps = config(rows, width)
    _training_gate_gradient[(rows * triton.cdiv(width, block),)](
        x_T2F, dy_TF.contiguous(), dx_T2F, dx_T2F.stride(-2), F=width, BLOCK=block, KIND=kind, num_warps=warps
    )


def gated_activation_gradient(x_T2F: Tensor, dy_TF: Tensor, kind: str) -> Tensor:
    """Compute `gradient.gated_activation_gradient`. Clamped kinds are torch's."""
    if kind not in KINDS:
        return gradient.gated_activation_gradient(x_T2F, dy_TF, kind)
    dx_T2F = torch.empty(x_T2F.shape, dtype=x_T2F.dtype, device=x_T2F.device)
    _gradient(x_T2F, dy_TF, dx_T2F, kind)
    return dx_T2F


def gated_activation(x_T2F: Tensor, kind: str) -> Tensor:
    """Compute `op.gated_activation`, with gradients. Clamped kinds are torch's. In a compiled graph it is a registered
    op."""
    if torch.compiler.is_compiling():
        return library_ops.gated_activation(x_T2F, kind)
    if kind not in KINDS:
        return torch_ops.gated_activation(x_T2F, kind)
    found: Tensor = _Gated.apply(x_T2F, kind)
    return found


_BLOCK, _WARPS = config(8192, 8192)
AOT = (
    AotKernel(
        _training_gate,
        dict.fromkeys(("x_ptr", "y_ptr"), "*bf16") | {"y_row": "i32:16"},
        {"F": 8192, "BLOCK": _BLOCK, "KIND": "silu"},
        num_warps=_WARPS,
        archs=ONE_OF_EACH,
    ),
    AotKernel(
        _training_gate_gradient,
        dict.fromkeys(("x_ptr", "dy_ptr", "dx_ptr"), "*bf16") | {"dx_row": "i32:16"},
        {"F": 8192, "BLOCK": _BLOCK, "KIND": "silu"},
        num_warps=_WARPS,
        archs=ONE_OF_EACH,
    ),
)
