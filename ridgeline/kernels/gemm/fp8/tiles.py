"""Products with 8-bit weights on any GPU: weights become 16-bit numbers in registers, and activations stay as they are.

An output is one chain of products in the order of the inputs, which is never split. With one cut for all numbers of
tokens its bits depend on its own token alone, so this kernel also serves "batch_invariant".

Legend:
    T  tokens
    R  weight rows of a tile
    B  inputs of a block
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.launch import INTERPRETED, launch_options
from ridgeline.kernels.gemm.fp8.choose import FIXED, Tile
from ridgeline.kernels.gemm.fp8.eight import Eight

SCALED = tl.constexpr(128)  # inputs, and outputs, of a block with a scale
_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit(do_not_specialize=["tokens"])
def tiles_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, y_ptr, x_stride, tokens, outputs, inputs,
    ROWS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,  # at most 128 if BLOCKED
    WHOLE: tl.constexpr,  # inputs is a multiple of BLOCK
    DOT: tl.constexpr,  # dtype of the operands
    BLOCKED: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute y [T, O]. scale: as `Eight` says."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Eight neighbouring token tiles go through all weight rows together, so both operands come from the cache.
    row_tiles = tl.cdiv(outputs, ROWS)
    first = tl.program_id(0) // (8 * row_tiles) * 8
    beside = tl.minimum(tl.cdiv(tokens, TOKENS) - first, 8)
    place = tl.program_id(0) % (8 * row_tiles)
    token_T = (first + place % beside) * TOKENS + tl.arange(0, TOKENS)
    row_R = tl.minimum(place // beside * ROWS + tl.arange(0, ROWS), outputs - 1)  # past the end the last row repeats
    input_B = tl.arange(0, BLOCK)
    real_1T = (token_T < tokens)[None, :]
    x_BT = x_ptr + token_T.to(tl.int64)[None, :] * x_stride + input_B[:, None]
    w_RB = weight_ptr + row_R.to(tl.int64)[:, None] * inputs + input_B[None, :]
    columns = tl.cdiv(inputs, SCALED)
    acc_RT = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, inputs, BLOCK):
        if WHOLE:
            weights = tl.load(w_RB + start)
            a_BT = tl.load(x_BT + start, mask=real_1T, other=0.0)
        else:
            inside_B = start + input_B < inputs
            weights = tl.load(w_RB + start, mask=inside_B[None, :], other=0.0)
            a_BT = tl.load(x_BT + start, mask=real_1T & inside_B[:, None], other=0.0)
        if BLOCKED:
            scale_R = tl.load(scale_ptr + row_R // SCALED * columns + start // SCALED)
            acc_RT += scale_R[:, None] * tl.dot(weights.to(DOT), a_BT.to(DOT), input_precision="ieee")
        else:
            acc_RT = tl.dot(weights.to(DOT), a_BT.to(DOT), acc_RT, input_precision="ieee")
    if not BLOCKED:
        acc_RT *= tl.load(scale_ptr + row_R)[:, None]
    if BIAS:
        acc_RT += tl.load(bias_ptr + row_R).to(tl.float32)[:, None]
    kept_R1 = (place // beside * ROWS + tl.arange(0, ROWS) < outputs)[:, None]
    y_RT = y_ptr + token_T.to(tl.int64)[None, :] * outputs + row_R[:, None]
    tl.store(y_RT, acc_RT.to(y_ptr.dtype.element_ty), mask=kept_R1 & real_1T)


def launch_tiles(plan: Tile, x_TI: Tensor, weight: Eight, bias_O: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias: [T, O] in the dtype of `x_TI`."""
    (tokens, inputs), outputs = x_TI.shape, len(weight.number_OI)
    y_TO = torch.empty(tokens, outputs, dtype=x_TI.dtype, device=x_TI.device)
    if not tokens:
        return y_TO
    # Triton's interpreter cannot multiply bfloat16: it would multiply the raw bits
    operands = torch.float32 if INTERPRETED and x_TI.dtype == torch.bfloat16 else x_TI.dtype
    tiles_kernel[(triton.cdiv(tokens, plan.tokens) * triton.cdiv(outputs, plan.rows),)](
        x_TI, weight.number_OI, weight.scale, y_TO if bias_O is None else bias_O, y_TO, x_TI.stride(0), tokens, outputs,
        inputs, ROWS=plan.rows, TOKENS=plan.tokens, BLOCK=plan.block, WHOLE=inputs % plan.block == 0,
        DOT=_DTYPES[operands], BLOCKED=weight.blocked, BIAS=bias_O is not None, num_warps=plan.warps,
        num_stages=plan.stages, **launch_options(x_TI.device),
    )  # fmt: skip
    return y_TO


def _aot(plan: Tile, kind: str, *, blocked: bool) -> AotKernel:
    signature = dict.fromkeys(("x_ptr", "bias_ptr", "y_ptr"), "*bf16")
    signature |= {"weight_ptr": f"*{kind}", "scale_ptr": "*fp32", "tokens": "i32"}
    signature |= dict.fromkeys(("x_stride", "outputs", "inputs"), "i32:16")
    cut = {"ROWS": plan.rows, "TOKENS": plan.tokens, "BLOCK": plan.block, "WHOLE": True, "DOT": tl.bfloat16}
    return AotKernel(
        tiles_kernel, signature, cut | {"BLOCKED": blocked, "BIAS": False}, num_warps=plan.warps,
        num_stages=plan.stages, hot=True, tensor_cores="MMA", archs=("sm_90", "gfx942"),
    )  # fmt: skip


AOT = (
    _aot(FIXED, "fp8e4nv", blocked=False),
    _aot(FIXED, "fp8e4nv", blocked=True),
    _aot(Tile(128, 128, 64, warps=8), "fp8e4nv", blocked=False),
    _aot(FIXED, "i8", blocked=False),
)
