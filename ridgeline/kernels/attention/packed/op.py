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

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, on_gpu


@dataclass
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
        return PackedRows(starts(num_tokens_R))

    @property
    def longest(self) -> int:
        """A number of tokens that no row exceeds."""
        return int(np.diff(self.start_R1).max(initial=1))

    def table(self, key: Hashable, make: Callable[[np.ndarray], np.ndarray], device: torch.device) -> Tensor:
        """Return the integers that `make` makes of the rows' tokens, [J, …], as int32 on the device. They are made once
        for all layers."""
        if key not in self.derived:
            self.derived[key] = sent(make(np.diff(self.start_R1)), device)
        found: Tensor = self.derived[key]
        return found


class LoadedRows(PackedRows):
    """Rows that are loaded anew into tables that stay where they are, so that a graph reads the newest. Lines of a
    table beyond those of the newest rows are 0.

    tokens: of all rows, always.
    most: as many rows as there may be, at most.
    longest: tokens that no row exceeds.
    """

    def __init__(self, tokens: int, most: int, longest: int) -> None:
        most = min(most, tokens)
        # Whatever the size of tiles, no other division has more: the rest of each row is one token
        self._divided_R = np.array([*[1] * (most - 1), tokens - most + 1])
        super().__init__(starts(self._divided_R))
        self.most, self._longest = most, min(longest, tokens)
        self._makers: dict[Hashable, Callable[[np.ndarray], np.ndarray]] = {}

    @property
    def longest(self) -> int:
        return self._longest

    def table(self, key: Hashable, make: Callable[[np.ndarray], np.ndarray], device: torch.device) -> Tensor:
        if key not in self.derived:
            self._makers[key] = make
            self.derived[key] = torch.zeros(make(self._divided_R).shape, dtype=torch.int32, device=device)
            self._fill(key)
        found: Tensor = self.derived[key]
        return found

    def holds(self, num_tokens_R: np.ndarray) -> bool:
        """Return True if these rows are not more or longer, and have as many tokens together, as was said at first."""
        fits = len(num_tokens_R) <= self.most and num_tokens_R.sum() == self.start_R1[-1]
        return bool(fits and num_tokens_R.max(initial=0) <= self.longest)

    def load(self, num_tokens_R: np.ndarray) -> None:
        """Take rows that it `holds`."""
        self.start_R1 = starts(num_tokens_R)
        for key in self._makers:
            self._fill(key)

    def _fill(self, key: Hashable) -> None:
        table: Tensor = self.derived[key]
        made, whole = self._makers[key](np.diff(self.start_R1)), np.zeros(table.shape, np.int32)
        whole[: len(made)] = made
        table.copy_(sent(whole, table.device))


def starts(num_tokens_R: np.ndarray) -> np.ndarray:
    """Return the first token of each row, then the number of all: int64 [R + 1]."""
    return np.concatenate([[0], np.cumsum(num_tokens_R, dtype=np.int64)])


def sent(table: np.ndarray, device: torch.device) -> Tensor:
    """Return a table of integers as int32 on the device. The host does not wait for the copy."""
    found = torch.from_numpy(table.astype(np.int32))
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


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
