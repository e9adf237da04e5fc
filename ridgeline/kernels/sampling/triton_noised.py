"""Logits with the noise of a draw, in one launch.

Legend:
    S  slots
    R  rows
    V  vocabulary
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.base.launch import compute_capability, launch_options
from ridgeline.kernels.base.rows import Feature
from ridgeline.kernels.sampling.noise import gumbel_of_groups
from ridgeline.kernels.sampling.op import SamplingTables
from ridgeline.kernels.sampling.torch_ops import ADJUSTING, adjusted

TILE = 1024  # tokens of a program: noise takes registers


def noised(logits_RV: Tensor, tables: SamplingTables, slots_R: Tensor, position_R: Tensor, features: Feature) -> Tensor:
    """Compute `noised.noised`. Rows of logits must be contiguous."""
    if features & ADJUSTING:
        logits_RV = adjusted(logits_RV, tables, slots_R, position_R, features)
    (rows, vocab), device = logits_RV.shape, logits_RV.device
    top_R = logits_RV.amax(-1)
    out_RV = torch.empty(rows, vocab, dtype=torch.float32, device=device)
    noised_kernel[(rows, triton.cdiv(vocab, TILE))](
        logits_RV, top_R, slots_R, position_R, tables.temperature_S, tables.seed_S, out_RV, vocab,
        logits_RV.stride(0), tables.seed_S.stride(0), tables.temperature_S.stride(0),
        TILE=TILE, RANDOM=bool(features & Feature.RANDOM), APPROX=compute_capability(device) != (0, 0), num_warps=4,
        **launch_options(device),
    )  # fmt: skip
    return out_RV


@triton.jit
def noised_kernel(
    logits_ptr, top_ptr, slots_ptr, position_ptr, temperature_ptr, seed_ptr, out_ptr, V, logits_stride, int_stride,
    float_stride, TILE: tl.constexpr, RANDOM: tl.constexpr, APPROX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write a tile of a row. Grid (R, tiles)."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    Q: tl.constexpr = TILE // 4
    group_Q = tile * Q + tl.arange(0, Q)
    token = group_Q[:, None] * 4 + tl.arange(0, 4)[None, :]
    valid = token < V
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(logits_ptr + row * logits_stride + token, mask=valid, other=0).to(tl.float32)
    x -= tl.load(top_ptr + row).to(tl.float32)
    if RANDOM:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        temperature = tl.load(temperature_ptr + slot * float_stride)
        if temperature > 0:
            seed = tl.load(seed_ptr + slot * int_stride)
            x = x / temperature + gumbel_of_groups(group_Q, tl.load(position_ptr + row), seed, Q, APPROX)
    tl.store(out_ptr + row * V + token, x, mask=valid)
