"""The least work of packed bidirectional attention.

Legend:
    R  rows
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ridgeline.kernels.base.cost import Cost


def packed_attention_cost(
    num_tokens_R: ArrayLike,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: float,
    window: int | None = None,
) -> Cost:
    """Count queries, keys and values as read once and outputs as written, and as FLOPs those of the two products for
    every pair of a query and a key that it sees."""
    tokens_R = np.asarray(num_tokens_R, np.float64)
    moved = 2 * float(tokens_R.sum()) * (num_heads + num_kv_heads) * head_dim * itemsize
    pairs_R = tokens_R * tokens_R
    if window is not None:  # what lies at the window's distance or beyond, to either side
        beyond_R = np.maximum(tokens_R - window, 0)
        pairs_R = pairs_R - beyond_R * (beyond_R + 1)
    return Cost(moved, 4.0 * head_dim * num_heads * float(pairs_R.sum()))
