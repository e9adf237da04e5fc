"""Cross-entropy of rows of logits and its gradient, in one kernel that writes the gradient where the logits were.

A program has one row. It reads it for the maximum and the sum of exponentials, both at once (Milakov and Gimelshein,
arXiv 1805.02867), and again for the gradient, mostly from the second-level cache.

Legend:
    N  rows
    V  vocabulary
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel

BLOCK, WARPS = 4096, 8


@triton.jit
def _cross_entropy(logits_ptr, targets_ptr, nats_ptr, stride, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    column = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(logits_ptr + start + column, mask=start + column < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.exp(x - shift)
        top = higher
    most = tl.max(top, 0)
    log = most + tl.log(tl.sum(total * tl.exp(top - most), 0))
    target = tl.load(targets_ptr + row)
    tl.store(nats_ptr + row, log - tl.load(logits_ptr + target).to(tl.float32))
    tl.debug_barrier()  # the target's logit is read before its place is written
    for start in range(0, V, BLOCK):
        at = start + column
        x = tl.load(logits_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32)
        share = tl.exp(x - log) - tl.where(at == target, 1.0, 0.0)
        tl.store(logits_ptr + at, share.to(logits_ptr.dtype.element_ty), mask=at < V)


def nats_with_gradient(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihood of each row's target, float32 [N], and the gradient of their sum by the
    logits, [N, V] in their dtype, which takes their place in memory."""
    count, vocabulary = logits_NV.shape
    assert logits_NV.stride(1) == 1
    nats_N = torch.empty(count, device=logits_NV.device)
    _cross_entropy[(count,)](
        logits_NV, targets_N, nats_N, logits_NV.stride(0), vocabulary, BLOCK=BLOCK, num_warps=WARPS
    )
    return nats_N, logits_NV


AOT = (
    AotKernel(
        _cross_entropy,
        {"logits_ptr": "*bf16", "targets_ptr": "*i64", "nats_ptr": "*fp32", "stride": "i32:16", "V": "i32:16"},
        {"BLOCK": BLOCK},
        num_warps=WARPS,
        archs=ONE_OF_EACH,
    ),
)
