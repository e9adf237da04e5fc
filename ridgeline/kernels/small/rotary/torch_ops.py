"""Rotary ops composed of torch's own.

Legend, beside that of op.py:
    U  query heads and key heads together
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ridgeline.kernels.small.norm.torch_ops import rms_norm
from ridgeline.kernels.small.rotary.op import Projected, rotate, split_heads, without_weight, write_kv

RmsNorm = Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]


def rope_kv_with(rms_norm: RmsNorm) -> Callable[[Projected], Tensor]:
    """Return `op.rope_kv` with this norm."""

    def rope_kv(projected: Projected) -> Tensor:
        (
            qkv_TX, q_norm_D, k_norm_D, eps, cos_sin_ZY, positions_T, k_cache_NGPD, v_cache_NGPD, place_T, num_heads,
            num_kv_heads, v_norm, scales,
        ) = projected  # fmt: skip
        q_THD, k_TGD, v_TGD = split_heads(qkv_TX, num_heads, num_kv_heads, k_cache_NGPD.shape[3])
        if v_norm:
            v_TGD = without_weight(v_TGD, eps)
        if q_norm_D is not None and k_norm_D is not None:
            q_THD, k_TGD = rms_norm(q_THD, None, q_norm_D, eps)[0], rms_norm(k_TGD, None, k_norm_D, eps)[0]
        if cos_sin_ZY is not None:
            heads_TUD = torch.cat((q_THD, k_TGD), dim=1)
            q_THD, k_TGD = rotate(heads_TUD, cos_sin_ZY, positions_T).split((num_heads, num_kv_heads), dim=1)
        write_kv(k_TGD, v_TGD, k_cache_NGPD, v_cache_NGPD, place_T, scales)
        return q_THD.contiguous()

    return rope_kv


rope_kv = rope_kv_with(rms_norm)
