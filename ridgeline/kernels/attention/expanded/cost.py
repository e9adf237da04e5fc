"""The least work of attention over expanded latents, the rows that it is the cheaper way for, and the memory that it
takes.

Legend:
    R  rows
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ridgeline.kernels.attention.paged.cost import visible
from ridgeline.kernels.base.cost import Cost

LEAST_TOKENS = 128  # of a row: fewer would leave most of a tile of queries idle
EXPANDED_BYTES = 128 << 20  # of the keys and values that are made at once, and of the vectors gathered for them
INDEX_BYTES, PLACE_BYTES = 8, 4  # of an index of torch, and of a place as it is kept


def worth_expanding(
    tokens_R: ArrayLike, kv_len_R: ArrayLike, *, key_dim: int, value_dim: int, rank: int, pace: float = 1.0
) -> np.ndarray:
    """Return True for each row that takes less with keys and values made than with queries against the latents: bool
    [R]. pace: how many times as long a FLOP of a pair against latents takes; with 1 these are FLOPs.

    A pair of query and key takes 4 · rank FLOPs a head against latents, and 2 · (key_dim + value_dim) otherwise, beside
    those of the rotated part. Against latents each query and result is multiplied by the projections, and otherwise
    each cached vector is: 2 · rank · (key_dim + value_dim) FLOPs a head in both cases.
    """
    tokens_R, kv_len_R = np.asarray(tokens_R, np.float64), np.asarray(kv_len_R, np.float64)
    pairs_R = tokens_R * kv_len_R - tokens_R * (tokens_R - 1) / 2
    sizes: dict[str, int] = {"key_dim": key_dim, "value_dim": value_dim, "rank": rank}
    found = fewer_flops(pairs_R, kv_len_R - tokens_R, **sizes, pace=pace)
    return np.asarray(found & (tokens_R >= LEAST_TOKENS))


def fewer_flops(
    pairs: float | np.ndarray, before: float | np.ndarray, *, key_dim: int, value_dim: int, rank: int, pace: float = 1.0
) -> Any:
    """Return True where keys and values take fewer FLOPs, those of pairs against latents times `pace`: for so many
    pairs of queries and keys, and so many cached tokens whose keys and values are made again. Arrays have an answer for
    each."""
    return (2 * rank * pace - (key_dim + value_dim)) * pairs > rank * (key_dim + value_dim) * before


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


def expansion_cost(tokens: float, *, num_heads: int, key_dim: int, value_dim: int, rank: int, itemsize: float) -> Cost:
    """Count so many latents as read, and the keys and values that are made of them as written. Weights are left out,
    since the step's own tokens need them too; and so are the rotated parts, which nothing is made of."""
    made = num_heads * (key_dim + value_dim)
    return Cost(tokens * (rank + made) * itemsize, 2.0 * tokens * rank * made)


def expanded_bytes(
    max_tokens: int,
    longest: int,
    *,
    num_heads: int,
    key_dim: int,
    rope_dim: int,
    value_dim: int,
    rank: int,
    itemsize: int,
) -> int:
    """Return the most memory that a step of so many tokens takes at once for its long rows: tables of where the latents
    of all of them lie, and for the rows that are expanded together further tables, what is gathered, and the keys and
    values of as many heads as there is room for, or of one. It is 0 if no row can be worth expanding.

    longest: the most tokens that a row has in the cache.
    """
    if min(max_tokens, longest) < LEAST_TOKENS or 2 * rank <= key_dim + value_dim:
        return 0
    rows = max_tokens // LEAST_TOKENS
    gathered, made = (rank + rope_dim) * itemsize, (key_dim + value_dim) * itemsize
    together = min(rows * longest, max(longest, EXPANDED_BYTES // gathered))
    expanded = min(together * num_heads * made, max(EXPANDED_BYTES, together * made))
    return 2 * PLACE_BYTES * rows * longest + together * (3 * INDEX_BYTES + gathered) + expanded
