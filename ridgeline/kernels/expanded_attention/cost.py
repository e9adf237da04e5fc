"""The least work of attention over expanded latents, and the rows that it is the cheaper way for.

Legend:
    R  rows
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ridgeline.core.cost import Cost
from ridgeline.kernels.attention.cost import visible

LEAST_TOKENS = 128  # of a row: fewer would leave most of a tile of queries idle
EXPANDED_BYTES = 128 << 20  # of the keys and values that are made at once, and of the vectors gathered for them


def worth_expanding(
    tokens_R: ArrayLike, kv_len_R: ArrayLike, *, key_dim: int, rope_dim: int, value_dim: int, rank: int
) -> np.ndarray:
    """Return which rows take fewer FLOPs with keys and values made than with queries against the latents: bool [R].

    A pair of query and key takes 2 · (2 · rank + rope_dim) FLOPs a head against latents, and 2 · (key_dim + rope_dim +
    value_dim) otherwise. Against latents each query and result is multiplied by the projections, and otherwise each
    cached vector is: 2 · rank · (key_dim + value_dim) FLOPs a head in both cases.
    """
    tokens_R, kv_len_R = np.asarray(tokens_R, np.float64), np.asarray(kv_len_R, np.float64)
    pairs_R = tokens_R * kv_len_R - tokens_R * (tokens_R - 1) / 2
    saved = (2 * rank + rope_dim) - (key_dim + rope_dim + value_dim)
    found: np.ndarray = saved * pairs_R > rank * (key_dim + value_dim) * (kv_len_R - tokens_R)
    return found & (tokens_R >= LEAST_TOKENS)


def expanded_attention_cost(
    tokens_R: ArrayLike,
    kv_len_R: ArrayLike,
    *,
    num_heads: int,
    key_dim: int,
    rope_dim: int,
    value_dim: int,
    itemsize: float,
) -> Cost:
    """Count queries, keys and values as read once and outputs as written. FLOPs are those of both products, and
    nothing for pairs that causality hides."""
    pairs, keys = visible(tokens_R, kv_len_R, None)
    tokens = float(np.sum(tokens_R))
    query, pair = key_dim + rope_dim, key_dim + value_dim
    moved = tokens * num_heads * (query + value_dim) + keys * (num_heads * pair + rope_dim)
    return Cost(moved * itemsize, 2.0 * num_heads * (query + value_dim) * pairs)
