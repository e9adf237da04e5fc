"""Activations, plain and gated, in one kernel: read once, computed in float32, written once. The legend is that of
op.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.small.activation import torch_ops

KINDS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2")
GATED_KINDS = (*KINDS, "swiglu_clamped", "silu_clamped_7", "silu_clamped_16")


@triton.jit
def activate(x, KIND: tl.constexpr):
    """Apply `KIND` to float32 values, here and in the epilogues of matrix products."""
    if KIND == "silu":
        y = x * tl.sigmoid(x)
    elif KIND == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif KIND == "quick_gelu":
        y = x * tl.sigmoid(1.702 * x)
    elif KIND == "relu":
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == "relu2":
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        y = y * y
    else:
        tl.static_assert(KIND == "gelu_tanh")
        # (1 + tanh(u)) / 2 = sigmoid(2u), here with u = sqrt(2 / pi) * (x + 0.044715 x^3)
        y = x * tl.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))
    return y


@triton.jit
def _clamped_product(gate, up, LIMIT: tl.constexpr):
    """Return min(gate, LIMIT) times up between ±LIMIT."""
    gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return gate * tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gated(gate, up, KIND: tl.constexpr):
    """Return the gated activation of float32 values, here and in the epilogues of matrix products."""
    if KIND == "swiglu_clamped":
        gate = tl.minimum(gate, 7.0)
        y = gate * tl.sigmoid(1.702 * gate) * (tl.minimum(tl.maximum(up, -7.0), 7.0) + 1)
    elif KIND == "silu_clamped_7":
        y = _clamped_product(activate(gate, "silu"), up, 7.0)
    elif KIND == "silu_clamped_16":
        y = _clamped_product(activate(gate, "silu"), up, 16.0)
    else:
        y = activate(gate, KIND) * up
    return y


@triton.jit
def _activation(
    x_ptr, y_ptr, row_stride,
    F: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    blocks: tl.constexpr = (F + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < F
    x = tl.load(x_ptr + row * row_stride + column, mask=mask, other=0)
    if GATED:
        up = tl.load(x_ptr + row * row_stride + F + column, mask=mask, other=0)
        y = gated(x.to(tl.float32), up.to(tl.float32), KIND)
    else:
        y = activate(x.to(tl.float32), KIND)
    tl.store(y_ptr + row * F + column, y.to(x.dtype), mask=mask)


def config(rows: int, width: int) -> tuple[int, int]:
    """Return (BLOCK, warps), with 8 elements per thread. About one program starts per nanosecond, so many rows take
    larger programs."""
    block = min(triton.next_power_of_2(width), 1024 if rows <= 32 else 2048)
    return block, max(1, block // 256)


def _launch(x: Tensor, kind: str, *, is_gated: bool) -> Tensor:
    if kind not in (GATED_KINDS if is_gated else KINDS):
        raise ValueError(f"unknown activation {kind!r}")
    columns = x.shape[-1]
    width = columns // 2 if is_gated else columns
    y = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    rows = x if x.ndim == 2 else x.reshape(-1, columns)
    block, warps = config(rows.shape[0], width)
    _activation[(rows.shape[0] * triton.cdiv(width, block),)](
        rows, y, rows.stride(0), F=width, BLOCK=block, KIND=kind, GATED=is_gated,
        num_warps=warps, **launch_options(x.device),
    )  # fmt: skip
    return y


def activation(x_TF: Tensor, kind: str) -> Tensor:
    """Compute `op.activation`. If a gradient is wanted, torch's own kernels run, since these have none."""
    if torch.is_grad_enabled() and x_TF.requires_grad:
        return torch_ops.activation(x_TF, kind)
    return _launch(x_TF, kind, is_gated=False)


def gated_activation(x_T2F: Tensor, kind: str) -> Tensor:
    """Compute `op.gated_activation`. If a gradient is wanted, torch's own kernels run, since these have none."""
    if torch.is_grad_enabled() and x_T2F.requires_grad:
        return torch_ops.gated_activation(x_T2F, kind)
    return _launch(x_T2F, kind, is_gated=True)


def _aot(width: int, kind: str, *, is_gated: bool) -> AotKernel:
    block, warps = config(8192, width)
    signature = {"x_ptr": "*bf16", "y_ptr": "*bf16", "row_stride": "i32:16"}
    constants = {"F": width, "BLOCK": block, "KIND": kind, "GATED": is_gated}
    return AotKernel(_activation, signature, constants, num_warps=warps, hot=True, archs=ONE_OF_EACH)


AOT = (
    _aot(8192, "silu", is_gated=True),
    _aot(3072, "gelu_tanh", is_gated=False),
    _aot(14336, "gelu", is_gated=True),
)
