"""Heads' linear maps whose every output has the same bits, however many tokens stand beside it: one tile serves all
sizes, and an output is one chain of products in the order of the inputs.

Legend, beside that of op.py:
    M  tokens of a tile
    N  outputs of a tile
    B  inputs of a block
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import INTERPRETED, launch_options

TILE = {"TOKENS": 64, "OUTPUTS": 64, "BLOCK": 64}
WARPS, STAGES = 4, 3


@triton.jit(do_not_specialize=["tokens"])
def head_linear_kernel(
    x_ptr, weight_ptr, y_ptr, x_token, x_head, weight_head, weight_output, weight_input, tokens,
    HEADS: tl.constexpr, INPUTS: tl.constexpr, OUT: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute a tile of one head's y. WIDE: multiply in float32."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(1)
    token_M = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    output_N = tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS)
    input_B = tl.arange(0, BLOCK)
    real_M, real_N = token_M < tokens, output_N < OUT
    x_ptr_MB = x_ptr + token_M.to(tl.int64)[:, None] * x_token + head * x_head + input_B[None, :]
    weight_ptr_BN = weight_ptr + head.to(tl.int64) * weight_head + output_N[None, :] * weight_output
    acc_MN = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    for start in range(0, INPUTS, BLOCK):
        inside_B = start + input_B < INPUTS
        x_MB = tl.load(x_ptr_MB + start, mask=real_M[:, None] & inside_B[None, :], other=0)
        w_ptr_BN = weight_ptr_BN + (start + input_B)[:, None] * weight_input
        w_BN = tl.load(w_ptr_BN, mask=inside_B[:, None] & real_N[None, :], other=0)
        if WIDE:
            x_MB, w_BN = x_MB.to(tl.float32), w_BN.to(tl.float32)
        acc_MN = tl.dot(x_MB, w_BN, acc_MN, input_precision="ieee")
    y_ptr_MN = y_ptr + (token_M.to(tl.int64)[:, None] * HEADS + head) * OUT + output_N[None, :]
    tl.store(y_ptr_MN, acc_MN.to(y_ptr.dtype.element_ty), mask=real_M[:, None] & real_N[None, :])


def head_linear(x_THI: Tensor, weight_HOI: Tensor) -> Tensor:
    """Compute `op.head_linear`, dense. If a gradient is wanted, torch's own kernel runs."""
    if torch.is_grad_enabled() and (x_THI.requires_grad or weight_HOI.requires_grad):
        return torch.bmm(x_THI.transpose(0, 1), weight_HOI.mT).transpose(0, 1)
    (tokens, heads, inputs), outputs = x_THI.shape, weight_HOI.shape[1]
    x_THI = x_THI if x_THI.stride(2) == 1 else x_THI.contiguous()
    y_THO = x_THI.new_empty(tokens, heads, outputs)
    grid = triton.cdiv(tokens, TILE["TOKENS"]), heads, triton.cdiv(outputs, TILE["OUTPUTS"])
    head_linear_kernel[grid](
        x_THI, weight_HOI, y_THO, x_THI.stride(0), x_THI.stride(1), *weight_HOI.stride(), tokens,
        HEADS=heads, INPUTS=inputs, OUT=outputs, **TILE, WIDE=INTERPRETED and x_THI.dtype == torch.bfloat16,
        num_warps=WARPS, num_stages=STAGES, **launch_options(x_THI.device),
    )  # fmt: skip
    return y_THO


def _aot(inputs: int, outputs: int, strides: dict[str, str | int]) -> AotKernel:
    signature = dict.fromkeys(("x_ptr", "weight_ptr", "y_ptr"), "*bf16")
    signature |= dict.fromkeys(("x_token", "x_head", "weight_head"), "i32:16")
    constants = {"HEADS": 16, "INPUTS": inputs, "OUT": outputs, **TILE, "WIDE": False}
    for name, value in strides.items():
        if isinstance(value, int):
            constants[name] = value
        else:
            signature[name] = value
    signature |= {"tokens": "i32"}
    shape = {"num_warps": WARPS, "num_stages": STAGES}
    return AotKernel(head_linear_kernel, signature, constants, **shape, hot=True, archs=ONE_OF_EACH)


AOT = (
    _aot(128, 512, {"weight_output": 1, "weight_input": "i32:16"}),
    _aot(512, 128, {"weight_output": "i32:16", "weight_input": 1}),
)
