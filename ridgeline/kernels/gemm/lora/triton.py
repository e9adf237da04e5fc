"""Products of adapters on a GPU, in two launches: down into float32, then up into y.

A program has a tile of tokens of one adapter. The host does not know how many there are, so there are programs for the
most, and those without tokens end at once; tokens without an adapter have none. A token's bits do not depend on others:
sums run along the inputs in an order that the inputs' number alone decides.

Legend, beside that of op.py:
    M  tokens of a tile
    Q  ranks of a block
    B  inputs of a block
    N  outputs of a tile
    C  shares of the inputs
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import INTERPRETED, launch_options
from ridgeline.kernels.gemm.lora.op import OUTPUTS, AdapterFactors, TokensByAdapter

BLOCK = 128  # inputs of a block
SHARE = 1024  # inputs that one program multiplies at least, unless there are fewer
MOST_SHARES = 8
FEW_TOKENS, MANY_TOKENS, MANY = 16, 64, 512  # of a tile in steps of fewer than MANY tokens, and of more
MOST_RANKS = 64  # of a block


@triton.jit
def _tile(start_ptr, index, A: tl.constexpr, ADAPTERS: tl.constexpr, TOKENS: tl.constexpr):
    """Return the adapter of a tile of tokens, its first place in the order, and the adapter's end; ADAPTERS: there is
    no such tile."""
    adapter_A = tl.arange(0, A)
    inside_A = adapter_A < ADAPTERS
    first_A = tl.load(start_ptr + adapter_A, mask=inside_A, other=0)
    end_A = tl.load(start_ptr + adapter_A + 1, mask=inside_A, other=0)
    tiles_A = (end_A - first_A + TOKENS - 1) // TOKENS
    until_A = tl.cumsum(tiles_A, 0)
    adapter = tl.sum(((until_A <= index) & inside_A).to(tl.int32), 0)
    own_A = (adapter_A == adapter).to(tl.int32)
    first = tl.sum(own_A * (first_A + (index - until_A + tiles_A) * TOKENS), 0)
    return adapter, first, tl.sum(own_A * end_A, 0)


@triton.jit
def lora_down_kernel(
    x_ptr, down_ptr, rank_ptr, order_ptr, start_ptr, h_ptr, x_token, tokens,
    ADAPTERS: tl.constexpr, A: tl.constexpr, INPUTS: tl.constexpr, MOST: tl.constexpr, PARTS: tl.constexpr,
    SHARES: tl.constexpr, TOKENS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Store a share of the inputs' sum of down · x, [C, T, K] by the tokens' places in the order. WIDE: multiply in
    float32."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    adapter, first, end = _tile(start_ptr, tl.program_id(0), A, ADAPTERS, TOKENS)
    if adapter < ADAPTERS:
        blocks: tl.constexpr = (MOST + RANKS - 1) // RANKS
        part, rank_0 = tl.program_id(1) // blocks, tl.program_id(1) % blocks * RANKS
        share = tl.program_id(2)
        rank = tl.load(rank_ptr + adapter)
        if rank_0 < rank:
            place_M = first + tl.arange(0, TOKENS)
            real_M = place_M < end
            token_M = tl.load(order_ptr + place_M, mask=real_M, other=0)
            rank_Q = rank_0 + tl.arange(0, RANKS)
            real_Q = rank_Q < rank
            input_B = tl.arange(0, BLOCK)
            each: tl.constexpr = (INPUTS + SHARES * BLOCK - 1) // (SHARES * BLOCK) * BLOCK
            row_Q = (adapter.to(tl.int64) * PARTS + part) * MOST + rank_Q
            acc_MQ = tl.zeros((TOKENS, RANKS), tl.float32)
            for at in range(0, each, BLOCK):
                column_B = share * each + at + input_B
                inside_B = column_B < INPUTS
                x_ptr_MB = x_ptr + token_M.to(tl.int64)[:, None] * x_token + column_B[None, :]
                x_MB = tl.load(x_ptr_MB, mask=real_M[:, None] & inside_B[None, :], other=0)
                down_ptr_BQ = down_ptr + row_Q[None, :] * INPUTS + column_B[:, None]
                down_BQ = tl.load(down_ptr_BQ, mask=inside_B[:, None] & real_Q[None, :], other=0)
                if WIDE:
                    x_MB, down_BQ = x_MB.to(tl.float32), down_BQ.to(tl.float32)
                acc_MQ = tl.dot(x_MB, down_BQ, acc_MQ, input_precision="ieee")
            h_ptr_MQ = h_ptr + (share.to(tl.int64) * tokens + place_M[:, None]) * (PARTS * MOST) + part * MOST
            tl.store(h_ptr_MQ + rank_Q[None, :], acc_MQ, mask=real_M[:, None] & real_Q[None, :])


@triton.jit
def lora_up_kernel(
    y_ptr, h_ptr, up_ptr, rank_ptr, order_ptr, start_ptr, tile_ptr, y_token, up_adapter, up_output, tokens,
    ADAPTERS: tl.constexpr, A: tl.constexpr, MOST: tl.constexpr, PARTS: tl.constexpr,
    SHARES: tl.constexpr, TOKENS: tl.constexpr, RANKS: tl.constexpr, OUTPUTS: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Add up · h to a tile of y. WIDE: multiply in float32."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    adapter, first, end = _tile(start_ptr, tl.program_id(0), A, ADAPTERS, TOKENS)
    if adapter < ADAPTERS:
        rank = tl.load(rank_ptr + adapter)
        if rank > 0:
            tile = tl.program_id(1) * 3
            part = tl.load(tile_ptr + tile)
            output_N = tl.load(tile_ptr + tile + 1) + tl.arange(0, OUTPUTS)
            real_N = output_N < tl.load(tile_ptr + tile + 2)
            place_M = first + tl.arange(0, TOKENS)
            real_M = place_M < end
            token_M = tl.load(order_ptr + place_M, mask=real_M, other=0)
            up_ptr_N = up_ptr + adapter.to(tl.int64) * up_adapter + output_N.to(tl.int64) * up_output
            acc_MN = tl.zeros((TOKENS, OUTPUTS), tl.float32)
            for rank_0 in range(0, rank, RANKS):
                rank_Q = rank_0 + tl.arange(0, RANKS)
                real_Q = rank_Q < rank
                real_MQ = real_M[:, None] & real_Q[None, :]
                h_MQ = tl.zeros((TOKENS, RANKS), tl.float32)
                for share in range(SHARES):
                    line_M = (share * tokens + place_M).to(tl.int64)
                    h_ptr_MQ = h_ptr + line_M[:, None] * (PARTS * MOST) + part * MOST + rank_Q[None, :]
                    h_MQ += tl.load(h_ptr_MQ, mask=real_MQ, other=0)
                up_QN = tl.load(up_ptr_N[None, :] + rank_Q[:, None], mask=real_Q[:, None] & real_N[None, :], other=0)
                h_MQ = h_MQ.to(up_ptr.dtype.element_ty)
                if WIDE:
                    h_MQ, up_QN = h_MQ.to(tl.float32), up_QN.to(tl.float32)
                acc_MN = tl.dot(h_MQ, up_QN, acc_MN, input_precision="ieee")
            y_ptr_MN = y_ptr + token_M.to(tl.int64)[:, None] * y_token + output_N[None, :]
            real_MN = real_M[:, None] & real_N[None, :]
            y_MN = tl.load(y_ptr_MN, mask=real_MN, other=0).to(tl.float32) + acc_MN
            tl.store(y_ptr_MN, y_MN.to(y_ptr.dtype.element_ty), mask=real_MN)


def shares(inputs: int) -> int:
    """Return into how many shares the inputs are divided, so that few tokens use many multiprocessors."""
    return max(1, min(MOST_SHARES, inputs // SHARE))


def warps(tokens: int) -> int:
    """Return the warps of a program with a tile of so many tokens: with fewer its sums would not fit in registers."""
    return 4 if tokens < MANY_TOKENS else 8


def lora(y_TO: Tensor, x_TI: Tensor, factors: AdapterFactors, step: TokensByAdapter) -> None:
    """Compute `op.lora` without looking at a number on the host."""
    down_AKI, up_AOR, rank_A, tile_J3, _ = factors
    (tokens, inputs), (adapters, _, most) = x_TI.shape, up_AOR.shape
    assert up_AOR.stride(2) == 1
    if not tokens:
        return
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    parts, split = down_AKI.shape[1] // most, shares(inputs)
    each = FEW_TOKENS if tokens < MANY else MANY_TOKENS
    tiles = min(tokens, triton.cdiv(tokens, each) + adapters)
    ranks = min(MOST_RANKS, max(16, triton.next_power_of_2(most)))
    wide = INTERPRETED and x_TI.dtype == torch.bfloat16
    h_CTK = torch.empty(split, tokens, parts * most, dtype=torch.float32, device=x_TI.device)
    shape = {
        "ADAPTERS": adapters, "A": triton.next_power_of_2(adapters), "MOST": most, "PARTS": parts, "SHARES": split,
        "TOKENS": each, "RANKS": ranks, "WIDE": wide, "num_warps": warps(each), **launch_options(x_TI.device),
    }  # fmt: skip
    lora_down_kernel[(tiles, parts * triton.cdiv(most, ranks), split)](
        x_TI, down_AKI, rank_A, *step[:2], h_CTK, x_TI.stride(0), tokens, INPUTS=inputs, BLOCK=BLOCK, **shape
    )
    lora_up_kernel[(tiles, len(tile_J3))](
        y_TO, h_CTK, up_AOR, rank_A, *step[:2], tile_J3, y_TO.stride(0), up_AOR.stride(0), up_AOR.stride(1), tokens,
        OUTPUTS=OUTPUTS, **shape,
    )  # fmt: skip


def _aot(kernel: object, constants: dict[str, int], tokens: int) -> AotKernel:
    matrices = {"x_ptr": "*bf16", "y_ptr": "*bf16", "h_ptr": "*fp32", "down_ptr": "*bf16", "up_ptr": "*bf16"}
    tables = dict.fromkeys(("rank_ptr", "order_ptr", "start_ptr", "tile_ptr"), "*i32")
    counts = dict.fromkeys(("x_token", "y_token", "up_adapter", "up_output"), "i32:16") | {"tokens": "i32"}
    names = kernel.arg_names  # type: ignore[attr-defined]
    signature = {name: kind for name, kind in (matrices | tables | counts).items() if name in names}
    signature = {name: signature[name] for name in names if name in signature}
    shape = {"ADAPTERS": 64, "A": 64, "MOST": 16, "PARTS": 3, "SHARES": 4, "TOKENS": tokens, "RANKS": 16}
    constants = shape | constants | {"WIDE": False}
    return AotKernel(kernel, signature, constants, num_warps=warps(tokens), hot=True, archs=ONE_OF_EACH)


AOT = tuple(
    _aot(kernel, constants, tokens)
    for tokens in (FEW_TOKENS, MANY_TOKENS)
    for kernel, constants in (
        (lora_down_kernel, {"INPUTS": 4096, "BLOCK": BLOCK}),
        (lora_up_kernel, {"OUTPUTS": OUTPUTS}),
    )
)
