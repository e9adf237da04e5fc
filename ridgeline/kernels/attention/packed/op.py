"""Bidirectional attention over rows that lie packed behind one another: every token sees all tokens of its own row, or
those near it. Nothing is padded and nothing is cached.

Legend:
    T  tokens of all rows
    R  rows
    H  query heads
    G  key/value heads
    D  head width
    Q  tokens of one row
    J  query tiles
    L  2 P - 1 distances, for a number P that no row's tokens exceed
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, on_gpu


@dataclass(frozen=True)
class PackedRows:
    """The rows, as the host knows them.

    start_R1: the first token of each row, then T, int64. A row may have no tokens.
    derived: what an implementation has made of this for the step's other layers, by a key of its own.
    """

    start_R1: np.ndarray
    derived: dict[Any, Any] = field(default_factory=dict)

    @staticmethod
    def of(num_tokens_R: np.ndarray) -> PackedRows:
        """Return rows of so many tokens each."""
        return PackedRows(np.concatenate([[0], np.cumsum(num_tokens_R, dtype=np.int64)]))


def packed_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    rows: PackedRows,
    scale: float,
    window: int | None = None,
    bias_HL: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale · q·k + bias) v of every query over the keys of its row, computed in float32: [T, H, D] in
    the dtype of the queries.

    A head's numbers lie side by side; tokens and heads may lie apart. Consecutive H / G query heads share a key head.
    window: a query sees keys at a distance below it, to either side; None: all.
    bias_HL: what is added to a score by the distance of the key from its query, from 1 - P to P - 1; None: nothing.
    """
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    per_kv = q_THD.shape[1] // k_TGD.shape[1]
    for first, end in zip(rows.start_R1[:-1].tolist(), rows.start_R1[1:].tolist(), strict=True):
        q_HQD = q_THD[first:end].float().transpose(0, 1)
        k_HQD, v_HQD = (x[first:end].float().transpose(0, 1).repeat_interleave(per_kv, dim=0) for x in (k_TGD, v_TGD))
        scores_HQQ = scale * (q_HQD @ k_HQD.mT)
        if bias_HL is not None:
            scores_HQQ += by_distance(bias_HL, 0, end - first, 0, end - first).float()
        if window is not None:
            scores_HQQ.masked_fill_(~near(0, end - first, 0, end - first, window, q_THD.device), -torch.inf)
        out_THD[first:end] = (scores_HQQ.softmax(-1) @ v_HQD).transpose(0, 1).to(q_THD.dtype)
    return out_THD


def near(first: int, end: int, first_key: int, end_key: int, window: int, device: torch.device) -> Tensor:
    """Return bool [queries, keys], True where a query of first … end sees a key of first_key … end_key."""
    query = torch.arange(first, end, device=device)[:, None]
    return (torch.arange(first_key, end_key, device=device)[None, :] - query).abs() < window


def by_distance(bias_HL: Tensor, first: int, end: int, first_key: int, end_key: int) -> Tensor:
    """Return the bias [H, queries, keys] of queries first … end and keys first_key … end_key of a row."""
    query, key = (torch.arange(*each, device=bias_HL.device) for each in ((first, end), (first_key, end_key)))
    return bias_HL[:, key - query[:, None] + bias_HL.shape[1] // 2]


PACKED_ATTENTION = Op(
    "packed_attention",
    packed_attention,
    (
        Implementation("triton", "ridgeline.kernels.attention.packed.triton:packed_attention", on_gpu),
        Implementation("torch", "ridgeline.kernels.attention.packed.torch_ops:packed_attention"),
    ),
)
