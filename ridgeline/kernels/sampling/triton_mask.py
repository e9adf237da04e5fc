"""Token masks, given as bits, applied to the logits before tokens are drawn.

Every logit of a masked row is read and written back, although few change: whole vectors move faster than single logits.

Legend:
    R  rows
    V  vocabulary
    J  tiles of a row
    U  masked rows
    W  words of 32 bits; in the kernel, those of a tile
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.base.launch import launch_options

TILE = 4096  # tokens per program: 128 words, and one vector of 16 logits for each of 256 threads


def mask(logits_RV: Tensor, bits_UW: Tensor, row_U: Tensor) -> None:
    """Compute `op.mask_reference`. Rows of logits must be contiguous."""
    vocab = logits_RV.shape[1]
    mask_kernel[(triton.cdiv(vocab, TILE), len(row_U))](
        logits_RV, bits_UW, row_U, vocab, logits_RV.stride(0), bits_UW.stride(0),
        TILE=TILE, num_warps=8, **launch_options(logits_RV.device),
    )  # fmt: skip


@triton.jit
def mask_kernel(
    logits_ptr, bits_ptr, row_ptr, V, logits_stride, bits_stride, TILE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Apply one mask to one tile. Grid (J, U)."""
    tile, mask = tl.program_id(0), tl.program_id(1).to(tl.int64)
    W: tl.constexpr = TILE // 32
    word_W = tile * W + tl.arange(0, W)
    bit_32 = tl.arange(0, 32)
    token = word_W[:, None] * 32 + bit_32[None, :]
    valid = token < V
    if PDL:
        gdc_wait()
    row = tl.load(row_ptr + mask).to(tl.int64)
    bits_W = tl.load(bits_ptr + mask * bits_stride + word_W, mask=word_W * 32 < V, other=0)
    x_ptr = logits_ptr + row * logits_stride + token
    x = tl.load(x_ptr, mask=valid, other=0.0).to(tl.float32)  # converted back exactly when it is stored
    if PDL:
        gdc_launch_dependents()
    forbidden = ((bits_W[:, None] >> bit_32[None, :]) & 1) == 0
    tl.store(x_ptr, tl.where(forbidden & (x == x), float("-inf"), x), mask=valid)
