"""Packed attention whose scores have products with vectors of the distance between two tokens (He et al., arXiv
2006.03654), by torch's fused attention, which gets these products as a mask. The legend is that of op.py, and

    S  vectors of distances
    K  keys of a row
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.attention.packed.op import PackedRows

BLOCK = 256  # queries whose products are made at once


class Distances(NamedTuple):
    """The vectors of distances, as queries and as keys of each head, and the one of every distance of a query from a
    key, from 1 - P to P - 1."""

    q_SHD: Tensor
    k_SHD: Tensor
    index_L: Tensor


def disentangled_attention(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, rows: PackedRows, scale: float, distances: Distances
) -> Tensor:
    """Return softmax(scale · (q·k + q·k' + k·q')) v of every query over the keys of its row, where q' and k' are the
    vectors of their distance: [T, H, D]."""
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    as_q_HDS, as_k_HDS = (x.permute(1, 2, 0) for x in (distances.q_SHD, distances.k_SHD))
    middle, at = len(distances.index_L) // 2, torch.arange(q_THD.shape[0], device=q_THD.device)
    for first, end in zip(rows.start_R1[:-1].tolist(), rows.start_R1[1:].tolist(), strict=True):
        q_HQD, k_HKD, v_HKD = (x[first:end].transpose(0, 1) for x in (q_THD, k_THD, v_THD))
        of_keys_HKS = k_HKD @ as_q_HDS
        for start in range(0, end - first, BLOCK):
            part_HQD = q_HQD[:, start : start + BLOCK]
            query_Q = at[start : start + part_HQD.shape[1]]
            index_QK = distances.index_L[query_Q[:, None] - at[: end - first] + middle]
            from_q_HQK = (part_HQD @ as_k_HDS).gather(2, index_QK.expand(len(part_HQD), -1, -1))
            from_k_HKQ = of_keys_HKS.gather(2, index_QK.T.expand(len(part_HQD), -1, -1))
            mask_HQK = scale * (from_q_HQK + from_k_HKQ.mT)
            found = F.scaled_dot_product_attention(
                part_HQD[None], k_HKD[None], v_HKD[None], mask_HQK[None], scale=scale
            )
            out_THD[first + start : first + start + part_HQD.shape[1]] = found[0].transpose(0, 1)
    return out_THD
