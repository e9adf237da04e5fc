"""The last step of `grouped_down` where its products are one row for each pair: each token's rows are added up, in the
order of its choice and in float32, so that the sum does not depend on the tokens beside it. Legend: see op.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.gemm.route.op import Routes


def combine(y_PM: Tensor, routes: Routes, add_TM: Tensor | None, experts: int) -> Tensor:
    """Return each token's weighted sum over its pairs' rows, plus `add_TM`. Rows of pairs with none of these experts
    are not read."""
    (tokens, used), width = routes.expert_TK.shape, y_PM.shape[1]
    y_TM = torch.empty(tokens, width, dtype=y_PM.dtype, device=y_PM.device)
    block = min(512 if tokens < 256 else 2048, triton.next_power_of_2(width))
    add = y_PM if add_TM is None else add_TM
    # In one dimension, because a grid's second one ends at 65,535
    combine_kernel[(tokens * triton.cdiv(width, block),)](
        y_PM, routes.expert_TK, routes.weight_TK, routes.place_TK, add, y_TM, add.stride(0), M=width, E=experts,
        K=used, BLOCK=block, ADD=add_TM is not None, num_warps=max(1, block // 256), **launch_options(y_PM.device),
    )  # fmt: skip
    return y_TM


@triton.jit
def combine_kernel(
    pairs_ptr, expert_ptr, weight_ptr, place_ptr, add_ptr, y_ptr, add_stride,
    M: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add up the rows of each token's pairs [P, M], with weights. A program takes a block of M of one token, and
    those of a token are neighbours. Its threads hold columns, so that no sum crosses threads."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    BLOCKS: tl.constexpr = (M + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column_B = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    kept_B = column_B < M
    y_B = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        expert = tl.load(expert_ptr + token * K + k)
        place = tl.load(place_ptr + token * K + k).to(tl.int64)
        weight = tl.where(expert < E, tl.load(weight_ptr + token * K + k), 0.0)
        mask_B = kept_B & (expert + column_B * 0 < E)
        y_B += weight * tl.load(pairs_ptr + place * M + column_B, mask=mask_B, other=0.0).to(tl.float32)
    if ADD:
        y_B += tl.load(add_ptr + token * add_stride + column_B, mask=kept_B, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * M + column_B, y_B.to(y_ptr.dtype.element_ty), mask=kept_B)


def _aot() -> AotKernel:
    signature = dict.fromkeys(("pairs_ptr", "add_ptr", "y_ptr"), "*bf16")
    signature |= {"expert_ptr": "*i32", "weight_ptr": "*fp32", "place_ptr": "*i32", "add_stride": "i32:16"}
    constants = {"M": 2048, "E": 128, "K": 8, "BLOCK": 2048, "ADD": False}
    return AotKernel(combine_kernel, signature, constants, num_warps=8, hot=True, archs=("sm_90",))


AOT = (_aot(),)
