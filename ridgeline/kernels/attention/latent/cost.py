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
from ridgeline.kernels.base.kv_format import SCALE_BYTES

MOST_PROGRAMS = 304  # the multiprocessors of the largest GPU: each gets one


def vector_bytes(*, rank: int, rope_dim: int, itemsize: float, levels: bool) -> float:
    """Return the bytes that are kept of a token. levels: latents have 8 bits, and a scale."""
    return (rank + SCALE_BYTES if levels else rank * itemsize) + rope_dim * itemsize


def latent_kv_cost(
    tokens: int, *, num_heads: int, rank: int, rope_dim: int, itemsize: float, levels: bool = False
) -> Cost:
    """Count each token's latent, its rotated part and those of its queries as read once and written once, and an int32
    place as read. Weights and angles are left out. levels: latents are kept with 8 bits."""
    written = vector_bytes(rank=rank, rope_dim=rope_dim, itemsize=itemsize, levels=levels)
    read = (rank + rope_dim + 2 * num_heads * rope_dim) * itemsize
    return Cost(tokens * (read + written + 4), 0.0)


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
    levels: bool = False,
) -> Cost:
    """Count queries as read, outputs as written, and every cached vector that a row can see as read once: it serves all
    heads, as key and as value.

    FLOPs are those of the two products: 2 · (rank + rope_dim) and 2 · rank per head and visible (query, key) pair, and
    nothing for pairs that causality hides. Block tables (4 bytes a block) are left out. levels: latents are kept with
    8 bits.
    """
    pairs, keys = visible(num_tokens_R, kv_len_R, None)
    width, tokens = rank + rope_dim, float(np.sum(num_tokens_R))
    vector = vector_bytes(rank=rank, rope_dim=rope_dim, itemsize=itemsize, levels=levels)
    moved = tokens * num_heads * (width + rank) * itemsize + keys * vector
    return Cost(moved, 2.0 * (width + rank) * num_heads * pairs)
