"""Packed attention by torch's own fused attention: one call for rows of equal length that lie side by side, and one
for each block of queries where there is a window. The legend is that of op.py, and

    B  rows that run together
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.attention.packed.op import PackedRows, near

BLOCK = 256  # queries of a block with a window: each reads the window beside its own keys


def packed_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, rows: PackedRows, scale: float, window: int | None = None
) -> Tensor:
    """Compute `op.packed_attention`."""
    grouped = q_THD.shape[1] != k_TGD.shape[1]
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    for first, end, count in _runs(rows):
        q_BHQD, k_BGQD, v_BGQD = (x[first:end].unflatten(0, (count, -1)).transpose(1, 2) for x in (q_THD, k_TGD, v_TGD))
        out_BHQD = out_THD[first:end].unflatten(0, (count, -1)).transpose(1, 2)
        length = (end - first) // count
        if window is None or window >= length:
            out_BHQD.copy_(F.scaled_dot_product_attention(q_BHQD, k_BGQD, v_BGQD, scale=scale, enable_gqa=grouped))
            continue
        for start in range(0, length, BLOCK):
            stop = min(start + BLOCK, length)
            low, high = max(0, start - window + 1), min(length, stop + window - 1)
            out_BHQD[:, :, start:stop] = F.scaled_dot_product_attention(
                q_BHQD[:, :, start:stop],
                k_BGQD[:, :, low:high],
                v_BGQD[:, :, low:high],
                attn_mask=near(start, stop, low, high, window, q_THD.device),
                scale=scale,
                enable_gqa=grouped,
            )
    return out_THD


def _runs(rows: PackedRows) -> Iterator[tuple[int, int, int]]:
    """Yield the first token, the end and the number of neighbouring rows of equal length."""
    starts = rows.start_R1.tolist()
    row = 0
    while row < len(starts) - 1:
        length, last = starts[row + 1] - starts[row], row + 1
        while last < len(starts) - 1 and starts[last + 1] - starts[last] == length:
            last += 1
        if length:
            yield starts[row], starts[last], last - row
        row = last
