"""The least work of latent attention, and of the launch that fills its cache.

A row is described by its new tokens, which are its last positions, and by kv_len, the number of cached tokens after
these are written.

Legend:
    R  rows
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ridgeline.kernels.attention.paged.cost import ITEM_PAIRS, visible
from ridgeline.kernels.base.cost import Cost

MOST_PROGRAMS = 304  # the multiprocessors of the largest GPU: each gets one


def latent_kv_cost(tokens: int, *, num_heads: int, rank: int, rope_dim: int, itemsize: float) -> Cost:
    """Count each token's latent, its rotated part and those of its queries as read once and written once, and an int32
    place as read. Weights and angles are left out."""
    return Cost(tokens * (2 * (rank + rope_dim + num_heads * rope_dim) * itemsize + 4), 0.0)


def parts_bytes(rows: int, tokens_each: int, *, num_heads: int, rank: int) -> int:
    """Return the most memory that the parts of short rows take until they are added up on a GPU (`attention_schedule`):
    there are as many items as rows, and as many more as rows or multiprocessors."""
    pairs = max(16, num_heads, min(ITEM_PAIRS, tokens_each * num_heads))
    return (rows + max(rows, MOST_PROGRAMS)) * pairs * (rank + 1) * 4


def latent_attention_cost(
    num_tokens_R: ArrayLike,
    kv_len_R: ArrayLike,
    *,
    num_heads: int,
    rank: int,
    rope_dim: int,
    itemsize: float,
) -> Cost:
    """Count queries as read, outputs as written, and every cached vector that a row can see as read once: it serves all
    heads, as key and as value.

    FLOPs are those of the two products: 2 · (rank + rope_dim) and 2 · rank per head and visible (query, key) pair, and
    nothing for pairs that causality hides. Block tables (4 bytes a block) are left out.
    """
    pairs, keys = visible(num_tokens_R, kv_len_R, None)
    width, tokens = rank + rope_dim, float(np.sum(num_tokens_R))
    moved = tokens * num_heads * (width + rank) * itemsize + keys * width * itemsize
    return Cost(moved, 2.0 * (width + rank) * num_heads * pairs)
