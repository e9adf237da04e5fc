"""Attention to a part of the keys in Triton, by the kernels of triton.py: they can write the softmaxes' sums too."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.attention.op import RaggedBatch
from ridgeline.kernels.attention.triton import paged_attention


def partial_attention(
    q_THD: Tensor,
    k_cache_NGPD: Tensor,
    v_cache_NGPD: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    first_R: Tensor | None = None,
    softcap: float | None = None,
    slopes_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `partial.partial_attention`. There are no windows yet: each row's would begin at a key of its own."""
    if first_R is not None:
        raise ValueError("partial attention: the Triton kernels know no first key of a row")
    lse_TH = torch.full(q_THD.shape[:2], -torch.inf, dtype=torch.float32, device=q_THD.device)
    out_THD = paged_attention(
        q_THD, k_cache_NGPD, v_cache_NGPD, batch, scale=scale, softcap=softcap, slopes_H=slopes_H, lse_TH=lse_TH
    )
    return out_THD, lse_TH
