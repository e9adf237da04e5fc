"""Least work of paged attention over a ragged batch.

Legend: R rows, H query heads, G key/value heads, D head dim. Per row: new tokens (its last positions) and kv_len, the
tokens cached once they are written.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ridgeline.core.cost import Cost


def write_kv_cost(tokens: int, num_kv_heads: int, head_dim: int, *, itemsize: float, kv_itemsize: float) -> Cost:
    """Each token's key and value read once and written once, and an int32 place read."""
    return Cost(tokens * (2 * num_kv_heads * head_dim * (itemsize + kv_itemsize) + 4), 0.0)


def attention_cost(
    num_tokens_R: ArrayLike,
    kv_len_R: ArrayLike,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: float,
    kv_itemsize: float,
    window: int | None = None,
) -> Cost:
    """Queries read, outputs written, every cached key and value a row can see read once (grouped heads share it).

    Scores never touch memory (FlashAttention, arXiv 2205.14135). FLOPs are the two products: 4 D per head and visible
    (query, key) pair, nothing for what causality or the window hides; the softmax runs on other units meanwhile. Rows
    that share a prefix could share its read, which a step's shape does not tell. Block tables (4 bytes a block) are
    left out.
    """
    pairs, keys = visible(num_tokens_R, kv_len_R, window)
    tokens = float(np.sum(num_tokens_R))
    moved = 2 * tokens * num_heads * head_dim * itemsize + 2 * keys * num_kv_heads * head_dim * kv_itemsize
    return Cost(moved, 4.0 * head_dim * num_heads * pairs)


def visible(num_tokens_R: ArrayLike, kv_len_R: ArrayLike, window: int | None) -> tuple[float, float]:
    """(query-key pairs, keys) that are seen, summed over the rows.

    A query at position p sees min(p + 1, window) keys. A row's n queries together see min(kv_len, n + window - 1).
    """
    new_R, length_R = np.asarray(num_tokens_R, np.float64), np.asarray(kv_len_R, np.float64)
    pairs = new_R @ length_R - (new_R @ new_R - new_R.sum()) / 2
    if window is None:
        return float(pairs), float(length_R[new_R > 0].sum())
    # Query i of 0..n-1 (oldest first) loses the keys beyond the window: max(0, kv_len - n + 1 + i - window).
    last_R = np.maximum(length_R - window, 0)
    first_R = np.maximum(length_R - new_R + 1 - window, 0)
    cut_R = np.minimum(new_R, last_R - first_R + 1) * (first_R + last_R) / 2
    keys_R = np.where(new_R > 0, np.minimum(length_R, new_R + window - 1), 0)
    return float(pairs - cut_R.sum()), float(keys_R.sum())
