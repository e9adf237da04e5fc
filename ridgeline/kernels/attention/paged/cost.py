"""The least work of paged attention over a ragged batch.

A row is described by its new tokens, which are its last positions, and by kv_len, the number of cached tokens after
these are written.

Legend:
    R  rows
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ridgeline.kernels.base.cost import Cost

WORKSPACE_BYTES = 1 << 28  # a bound on the bytes of the keys and values that a pass in plain torch gathers
PIECE_QUERIES = 128  # tokens times heads of a long item of Hopper's kernel, whose keys may be cut into pieces
PIECES_EACH = 4  # pieces that a multiprocessor leaves, at most, by which their memory is bounded
MULTIPROCESSORS = 132  # of the largest GPU with that kernel
ITEM_PAIRS = 512  # tokens times heads of an item, at most, where a program takes only some of its queries


def pieces_bytes(head_dim: int) -> int:
    """Return the most bytes of float32 outputs, and logarithms of sums, of keys that are cut into pieces."""
    return MULTIPROCESSORS * PIECES_EACH * PIECE_QUERIES * (head_dim + 1) * 4


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
    shared: int = 0,
) -> Cost:
    """Count queries as read, outputs as written, and every cached key and value that a row can see as read once
    (grouped heads share it).

    Scores never touch memory (FlashAttention, arXiv 2205.14135). FLOPs are those of the two products: 4 · head_dim per
    head and visible (query, key) pair, and nothing for pairs that causality or the window hides. The softmax runs on
    other units meanwhile. The `shared` tokens that all rows begin with are read once for all rows (as in Hydragen,
    arXiv 2402.05099), but their FLOPs count for each row. Block tables (4 bytes a block) are left out.
    """
    pairs, keys = visible(num_tokens_R, kv_len_R, window, shared)
    tokens = float(np.sum(num_tokens_R))
    moved = 2 * tokens * num_heads * head_dim * itemsize + 2 * keys * num_kv_heads * head_dim * kv_itemsize
    return Cost(moved, 4.0 * head_dim * num_heads * pairs)


def visible(num_tokens_R: ArrayLike, kv_len_R: ArrayLike, window: int | None, shared: int = 0) -> tuple[float, float]:
    """Return (query-key pairs, keys) that are seen, summed over the rows. The first `shared` keys, which all rows have
    in common, count once.

    A query at position p sees min(p + 1, window) keys. A row's n queries together see min(kv_len, n + window - 1).
    """
    new_R, length_R = np.asarray(num_tokens_R, np.float64), np.asarray(kv_len_R, np.float64)
    pairs = new_R @ length_R - (new_R @ new_R - new_R.sum()) / 2
    seen_R = length_R if window is None else np.minimum(length_R, new_R + window - 1)
    seen_R = np.where(new_R > 0, seen_R, 0)
    keys = float(seen_R.sum()) - _repeated(length_R, seen_R, shared)
    if window is None:
        return float(pairs), keys
    # Query i of 0..n-1 (oldest first) loses the keys beyond the window: max(0, kv_len - n + 1 + i - window).
    last_R = np.maximum(length_R - window, 0)
    first_R = np.maximum(length_R - new_R + 1 - window, 0)
    cut_R = np.minimum(new_R, last_R - first_R + 1) * (first_R + last_R) / 2
    return float(pairs - cut_R.sum()), keys


def _repeated(length_R: np.ndarray, seen_R: np.ndarray, shared: int) -> float:
    """Return the number of repeated counts in the sum over rows: a key that n rows see is counted n - 1 times too
    often. Only the first `shared` keys are looked at.

    A row sees its newest `seen_R` keys, which are an interval. The union of all intervals, in the order of their
    starts, has no key twice.
    """
    if not shared:
        return 0.0
    order = np.argsort(length_R - seen_R)
    start_R, end_R = (length_R - seen_R)[order], np.minimum(length_R[order], shared)
    covered_R = np.concatenate(([0.0], np.maximum.accumulate(end_R)[:-1]))
    union = np.maximum(end_R - np.maximum(start_R, covered_R), 0).sum()
    return float(np.maximum(end_R - start_R, 0).sum() - union)
