"""Rotary ops composed of torch's own.

Legend, beside that of op.py:
    U  query heads and key heads together
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.base.kv_cache import KVScales
from ridgeline.kernels.small.norm.torch_ops import rms_norm
from ridgeline.kernels.small.rotary.op import rotate, split_heads, without_weight, write_kv


def rope_kv(
    qkv_TX: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    cos_sin_ZY: Tensor | None,
    positions_T: Tensor,
    k_cache_NGPD: Tensor,
    v_cache_NGPD: Tensor,
    place_T: Tensor,
    num_heads: int,
    num_kv_heads: int,
    v_norm: bool = False,
    scales: KVScales | None = None,
) -> Tensor:
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
