"""Linear maps whose every output is the same bits however many tokens stand beside it.

One tile shape, one order of summation and no split for any number of tokens: what decides the rounding of an output
then depends on its own row and column alone. Slower than choosing per shape (see docs/data-plane.md for the price).

Legend: T tokens, I inputs, O outputs; R weight rows, N tokens, B inputs of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.activation.triton import gated_activation
from ridgeline.kernels.aot import AotKernel
from ridgeline.kernels.launch import INTERPRETED, launch_options
from ridgeline.kernels.norm.triton import rms_norm

CUT = {"ROWS": 64, "TOKENS": 64, "BLOCK": 64, "num_warps": 4, "num_stages": 4}


@triton.jit(do_not_specialize=["tokens"])
def fixed_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, x_stride, tokens, outputs, inputs,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y [T, O]. Token tiles vary fastest, so that a weight tile is read from memory once. WIDE: multiply in float32."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token_N = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row_R = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    input_B = tl.arange(0, BLOCK)
    x_ptr += tl.minimum(token_N, tokens - 1).to(tl.int64)[None, :] * x_stride
    weight_ptr += tl.minimum(row_R, outputs - 1).to(tl.int64)[:, None] * inputs
    acc_RN = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, inputs, BLOCK):
        inside_B = start + input_B < inputs
        w_RB = tl.load(weight_ptr + start + input_B[None, :], mask=inside_B[None, :], other=0)
        x_BN = tl.load(x_ptr + start + input_B[:, None], mask=inside_B[:, None], other=0)
        if WIDE:
            w_RB, x_BN = w_RB.to(tl.float32), x_BN.to(tl.float32)
        acc_RN = tl.dot(w_RB, x_BN, acc_RN, input_precision="ieee")
    if BIAS:
        acc_RN += tl.load(bias_ptr + row_R, mask=row_R < outputs, other=0).to(tl.float32)[:, None]
    y_ptr += token_N.to(tl.int64)[None, :] * outputs + row_R[:, None]
    tl.store(y_ptr, acc_RN.to(y_ptr.dtype.element_ty), mask=(row_R < outputs)[:, None] & (token_N < tokens)[None, :])


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """As `op.linear`; torch's own where a gradient is wanted."""
    if torch.is_grad_enabled() and (x_TI.requires_grad or weight_OI.requires_grad):
        return torch.nn.functional.linear(x_TI, weight_OI, bias_O)
    (tokens, inputs), outputs = x_TI.shape, len(weight_OI)
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    y_TO = torch.empty(tokens, outputs, dtype=x_TI.dtype, device=x_TI.device)
    grid = triton.cdiv(tokens, CUT["TOKENS"]), triton.cdiv(outputs, CUT["ROWS"])
    fixed_kernel[grid](
        x_TI, weight_OI.contiguous(), weight_OI if bias_O is None else bias_O, y_TO, x_TI.stride(0), tokens, outputs,
        inputs, BIAS=bias_O is not None, WIDE=INTERPRETED and x_TI.dtype == torch.bfloat16,
        **CUT, **launch_options(x_TI.device),
    )  # fmt: skip
    return y_TO


def norm_linear(
    x_TI: Tensor,
    residual_TI: Tensor | None,
    norm_weight_I: Tensor,
    eps: float,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    gate: str | None,
) -> tuple[Tensor, Tensor]:
    """As `op.norm_linear`, one kernel after the other."""
    y_TI, s_TI = rms_norm(x_TI, residual_TI, norm_weight_I, eps)
    y_TO = linear(y_TI, weight_OI, bias_O)
    return (gated_activation(y_TO, gate) if gate else y_TO), s_TI


AOT = (
    AotKernel(
        fixed_kernel,
        dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "y_ptr"), "*bf16")
        | dict.fromkeys(("x_stride", "outputs", "inputs"), "i32:16")
        | {"tokens": "i32"},
        {"ROWS": 64, "TOKENS": 64, "BLOCK": 64, "BIAS": False, "WIDE": False},
        num_warps=4,
        num_stages=4,
        hot=True,
        tensor_cores="HGMMA",
    ),
)
