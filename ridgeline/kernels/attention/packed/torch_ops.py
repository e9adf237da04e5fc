"""Packed attention by torch's own fused attention: one call for rows of equal length that lie side by side, and one
for each block of queries where there is a window or a bias. The legend is that of op.py, and

    B  rows that run together
    K  keys of a block
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.attention.packed.op import PackedRows, by_distance, near

BLOCK = 256  # queries of a block with a window, which reads the window beside its own keys, or with a bias


def packed_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    rows: PackedRows,
    scale: float,
    window: int | None = None,
    bias_HL: Tensor | None = None,
) -> Tensor:
    """Compute `op.packed_attention`."""
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    for first, end, count in _runs(rows):
        q_BHQD, k_BGQD, v_BGQD = (x[first:end].unflatten(0, (count, -1)).transpose(1, 2) for x in (q_THD, k_TGD, v_TGD))
        out_BHQD = out_THD[first:end].unflatten(0, (count, -1)).transpose(1, 2)
        length = (end - first) // count
        windowed = window is not None and window < length
        block, reach = (BLOCK if windowed or bias_HL is not None else length), (window or 0) if windowed else length
        for start in range(0, length, block):
            stop = min(start + block, length)
            low, high = max(0, start - reach + 1), min(length, stop + reach - 1)
            part = start, stop, low, high
            out_BHQD[:, :, start:stop] = F.scaled_dot_product_attention(
                q_BHQD[:, :, start:stop],
                k_BGQD[:, :, low:high],
                v_BGQD[:, :, low:high],
                attn_mask=_mask(part, window if windowed else None, bias_HL, q_THD),
                scale=scale,
                enable_gqa=q_THD.shape[1] != k_TGD.shape[1],
            )
    return out_THD


def _mask(part: tuple[int, int, int, int], window: int | None, bias_HL: Tensor | None, like: Tensor) -> Tensor | None:
    """Return the mask of some queries and keys: numbers to add to scores, or which keys are seen; None: no mask."""
    seen = None if window is None else near(*part, window, like.device)
    if bias_HL is None:
        return seen
    added_HQK = by_distance(bias_HL, *part).to(like.dtype)
    return added_HQK if seen is None else added_HQK.masked_fill(~seen, -torch.inf)


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
