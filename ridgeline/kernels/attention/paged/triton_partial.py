"""Attention to a part of the keys in Triton, by the kernels of triton.py: they can write the softmaxes' sums too.

Legend, beside those of op.py and partial.py:
    E  heads of a program
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.attention.paged.op import RaggedBatch, Softmax
from ridgeline.kernels.attention.paged.triton import paged_attention
from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options

MERGED = 4096  # numbers of an output that a program holds at once


def partial_attention(
    q_THD: Tensor,
    k_cache_NGPD: Tensor,
    v_cache_NGPD: Tensor,
    batch: RaggedBatch,
    softmax: Softmax,
    first_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `partial.partial_attention`. There are no windows yet: each row's would begin at a key of its own."""
    if first_R is not None:
        raise ValueError("partial attention: the Triton kernels know no first key of a row")
    lse_TH = torch.full(q_THD.shape[:2], -torch.inf, dtype=torch.float32, device=q_THD.device)
    own = softmax._replace(sinks_H=None, window=None)
    out_THD = paged_attention(q_THD, k_cache_NGPD, v_cache_NGPD, batch, own, lse_TH=lse_TH)
    return out_THD, lse_TH


def merge_attention(out_NTHD: Tensor, lse_NTH: Tensor, sinks_H: Tensor | None = None) -> Tensor:
    """Compute `partial.merge_attention`."""
    parts, num_tokens, num_heads, head_dim = out_NTHD.shape
    out_THD = torch.empty(out_NTHD.shape[1:], dtype=out_NTHD.dtype, device=out_NTHD.device)
    dim = triton.next_power_of_2(head_dim)
    heads = max(1, min(triton.next_power_of_2(num_heads), MERGED // dim))
    _merge_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        out_NTHD,
        lse_NTH,
        sinks_H,
        out_THD,
        *out_NTHD.stride()[:3],
        *lse_NTH.stride(),
        num_heads,
        PARTS=parts,
        HEAD_DIM=head_dim,
        DIM=dim,
        HEADS=heads,
        SINKS=sinks_H is not None,
        num_warps=max(1, min(4, heads * dim // 512)),
        **launch_options(out_NTHD.device),
    )
    return out_THD


@triton.jit
def _merge_kernel(
    part_ptr, lse_ptr, sinks_ptr, out_ptr,
    stride_part, stride_token, stride_head, stride_lse_part, stride_lse_token, stride_lse_head, num_heads,
    PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr, SINKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Merge one token's parts for HEADS heads."""
    token = tl.program_id(0).to(tl.int64)
    head_E = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d_D = tl.arange(0, DIM)
    real_E = head_E < num_heads
    real_ED = real_E[:, None] & (d_D < HEAD_DIM)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lse_E_ptr = lse_ptr + token * stride_lse_token + head_E * stride_lse_head
    part_ED_ptr = part_ptr + token * stride_token + head_E[:, None] * stride_head + d_D[None, :]
    max_E = tl.full((HEADS,), -1e30, tl.float32)  # finite, so that no difference is inf - inf
    if SINKS:
        sink_E = tl.load(sinks_ptr + head_E, mask=real_E, other=0).to(tl.float32)
        max_E = tl.maximum(max_E, sink_E)
    for part in tl.static_range(PARTS):
        max_E = tl.maximum(max_E, tl.load(lse_E_ptr + part * stride_lse_part, mask=real_E, other=0))
    sum_E = tl.zeros((HEADS,), tl.float32)
    if SINKS:
        sum_E = tl.exp(sink_E - max_E)
    acc_ED = tl.zeros((HEADS, DIM), tl.float32)
    for part in tl.static_range(PARTS):
        lse_E = tl.load(lse_E_ptr + part * stride_lse_part, mask=real_E, other=0)
        weight_E = tl.exp(lse_E - max_E)
        part_ED = tl.load(part_ED_ptr + part * stride_part, mask=real_ED, other=0).to(tl.float32)
        sum_E += weight_E
        acc_ED += tl.where(lse_E[:, None] == -float("inf"), 0.0, weight_E[:, None] * part_ED)
    acc_ED = acc_ED / tl.where(sum_E == 0, 1.0, sum_E)[:, None]
    out_ED_ptr = out_ptr + (token * num_heads + head_E[:, None]) * HEAD_DIM + d_D[None, :]
    tl.store(out_ED_ptr, acc_ED.to(out_ptr.dtype.element_ty), mask=real_ED)


AOT = (
    AotKernel(
        _merge_kernel,
        {
            **{"part_ptr": "*bf16", "lse_ptr": "*fp32", "out_ptr": "*bf16"},
            **dict.fromkeys(("stride_part", "stride_token", "stride_head"), "i32"),
            **dict.fromkeys(("stride_lse_part", "stride_lse_token", "stride_lse_head", "num_heads"), "i32"),
        },
        {"sinks_ptr": None, "PARTS": 2, "HEAD_DIM": 128, "DIM": 128, "HEADS": 32, "SINKS": False},
        num_warps=4,
        archs=ONE_OF_EACH,
    ),
)
