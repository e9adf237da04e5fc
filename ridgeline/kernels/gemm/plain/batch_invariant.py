"""Linear maps whose every output has the same bits, however many tokens stand beside it.

An output is one chain of products in the order of the inputs, which is never split. Each step of the matrix units adds
the next 16 products to the sum so far (in float32: one product). A tile only says which outputs a program computes, so
it may depend on the number of tokens without changing a bit: tests/kernels/gemm/test_batch_invariant.py compares all of
Hopper's tiles. The units of other GPUs may step differently with other tiles, so there one tile serves all sizes.

Legend:
    T  tokens
    I  inputs
    O  outputs
    R  weight rows of a tile
    B  inputs of a block
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.launch import INTERPRETED, compute_capability, launch_options
from ridgeline.kernels.gemm.plain.op import in_three
from ridgeline.kernels.small.activation.triton import gated_activation
from ridgeline.kernels.small.norm.triton import rms_norm


@dataclass(frozen=True)
class Tile:
    """The cut of the kernel: a program computes tokens x rows outputs, `block` inputs at a step. tokens is 64 or 128,
    the rows of Hopper's products."""

    tokens: int
    rows: int
    block: int
    warps: int = 4
    stages: int = 4


ANY = Tile(64, 64, 64)
ALONE = Tile(128, 128, 64, warps=8)  # in place of HOPPER[0] if each multiprocessor gets at most one program
HOPPER = (
    Tile(128, 128, 64, stages=3),
    Tile(64, 128, 64, stages=5),
    Tile(64, 64, 128),
    Tile(64, 32, 256, stages=3),
    Tile(64, 16, 256),
)
ENOUGH = 96  # so many programs use the memory's bandwidth well
MULTIPROCESSORS = 132  # those of an H200


def choose(tokens: int, outputs: int) -> Tile:
    """Return the largest tile of `HOPPER` that gives enough programs. The tiles were tuned on an H200."""
    for tile in HOPPER if tokens > 64 else HOPPER[1:]:
        programs = -(-tokens // tile.tokens) * -(-outputs // tile.rows)
        if programs >= ENOUGH:
            return ALONE if tile is HOPPER[0] and programs <= MULTIPROCESSORS else tile
    return HOPPER[-1]


@triton.jit(do_not_specialize=["tokens"])
def batch_invariant_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, x_stride, tokens, outputs, inputs,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute y [T, O]. EVEN: BLOCK divides the inputs. WIDE: multiply in float32."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Eight neighbouring token tiles go through all weight rows together, so both operands come from the L2 cache.
    row_tiles = tl.cdiv(outputs, ROWS)
    first = tl.program_id(0) // (8 * row_tiles) * 8
    beside = tl.minimum(tl.cdiv(tokens, TOKENS) - first, 8)
    place = tl.program_id(0) % (8 * row_tiles)
    token_T = (first + place % beside) * TOKENS + tl.arange(0, TOKENS)
    row_R = place // beside * ROWS + tl.arange(0, ROWS)
    input_B = tl.arange(0, BLOCK)
    real_T = token_T < tokens
    x_ptr_TB = x_ptr + token_T.to(tl.int64)[:, None] * x_stride + input_B[None, :]
    w_ptr_BR = weight_ptr + tl.minimum(row_R, outputs - 1).to(tl.int64)[None, :] * inputs + input_B[:, None]
    acc_TR = tl.zeros((TOKENS, ROWS), tl.float32)
    for start in range(0, inputs, BLOCK):
        if EVEN:
            x_TB = tl.load(x_ptr_TB + start, mask=real_T[:, None], other=0)
            w_BR = tl.load(w_ptr_BR + start)
        else:
            inside_B = start + input_B < inputs
            x_TB = tl.load(x_ptr_TB + start, mask=real_T[:, None] & inside_B[None, :], other=0)
            w_BR = tl.load(w_ptr_BR + start, mask=inside_B[:, None], other=0)
        if WIDE:
            x_TB, w_BR = x_TB.to(tl.float32), w_BR.to(tl.float32)
        acc_TR = tl.dot(x_TB, w_BR, acc_TR, input_precision="ieee")
    if BIAS:
        acc_TR += tl.load(bias_ptr + row_R, mask=row_R < outputs, other=0).to(tl.float32)[None, :]
    y_ptr_TR = y_ptr + token_T.to(tl.int64)[:, None] * outputs + row_R[None, :]
    tl.store(y_ptr_TR, acc_TR.to(y_ptr.dtype.element_ty), mask=real_T[:, None] & (row_R < outputs)[None, :])


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, tile: Tile | None = None) -> Tensor:
    """Compute `op.linear`. If a gradient is wanted, torch's own kernel runs."""
    if torch.is_grad_enabled() and (x_TI.requires_grad or weight_OI.requires_grad):
        return torch.nn.functional.linear(x_TI, weight_OI, bias_O)
    (tokens, inputs), outputs = x_TI.shape, len(weight_OI)
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    y_TO = torch.empty(tokens, outputs, dtype=x_TI.dtype, device=x_TI.device)
    if tile is None:
        tuned = x_TI.element_size() == 2 and compute_capability(x_TI.device) == (9, 0)
        tile = choose(tokens, outputs) if tuned else ANY
    batch_invariant_kernel[(triton.cdiv(tokens, tile.tokens) * triton.cdiv(outputs, tile.rows),)](
        x_TI, weight_OI.contiguous(), weight_OI if bias_O is None else bias_O, y_TO, x_TI.stride(0), tokens, outputs,
        inputs, **_constants(tile), BIAS=bias_O is not None, EVEN=inputs % tile.block == 0,
        WIDE=INTERPRETED and x_TI.dtype == torch.bfloat16, num_warps=tile.warps, num_stages=tile.stages,
        **launch_options(x_TI.device),
    )  # fmt: skip
    return y_TO


norm_linear = in_three(rms_norm, linear, gated_activation)


def _constants(tile: Tile) -> dict[str, int]:
    return {"TOKENS": tile.tokens, "ROWS": tile.rows, "BLOCK": tile.block}


def _aot(tile: Tile, **options: Any) -> AotKernel:
    signature = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "y_ptr"), "*bf16")
    signature |= dict.fromkeys(("x_stride", "outputs", "inputs"), "i32:16") | {"tokens": "i32"}
    constants = {**_constants(tile), "BIAS": False, "EVEN": True, "WIDE": False}
    shape = {"num_warps": tile.warps, "num_stages": tile.stages}
    return AotKernel(batch_invariant_kernel, signature, constants, **shape, hot=True, tensor_cores="HGMMA", **options)


AOT = (_aot(ANY), *(_aot(tile, archs=("sm_90",)) for tile in (ALONE, *HOPPER)))
