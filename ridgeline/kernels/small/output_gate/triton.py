"""The gate in one kernel: read once, computed in float32, written once. The legend is that of op.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.small.activation.triton import config
from ridgeline.kernels.small.output_gate import torch_ops


@triton.jit
def _output_gate(
    x_ptr, gate_ptr, y_ptr, x_stride, gate_stride, X: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    blocks: tl.constexpr = (X + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < X
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0)
    y = x.to(tl.float32) * tl.sigmoid(gate.to(tl.float32))
    tl.store(y_ptr + row * X + column, y.to(x.dtype), mask=mask)


def output_gate(x_TX: Tensor, gate_TX: Tensor) -> Tensor:
    """Compute `op.output_gate`. If a gradient is wanted, torch's own kernels run, since this has none."""
    if torch.is_grad_enabled() and (x_TX.requires_grad or gate_TX.requires_grad):
        return torch_ops.output_gate(x_TX, gate_TX)
    tokens, width = x_TX.shape
    y_TX = torch.empty(tokens, width, dtype=x_TX.dtype, device=x_TX.device)
    block, warps = config(tokens, width)
    _output_gate[(tokens * triton.cdiv(width, block),)](
        x_TX, gate_TX, y_TX, x_TX.stride(0), gate_TX.stride(0), X=width, BLOCK=block,
        num_warps=warps, **launch_options(x_TX.device),
    )  # fmt: skip
    return y_TX


def _aot(width: int) -> AotKernel:
    block, warps = config(8192, width)
    signature = {f"{name}_ptr": "*bf16" for name in ("x", "gate", "y")}
    signature |= {"x_stride": "i32:16", "gate_stride": "i32:16"}
    return AotKernel(
        _output_gate, signature, {"X": width, "BLOCK": block}, num_warps=warps, hot=True, archs=ONE_OF_EACH
    )


AOT = (_aot(4096),)
