"""The least work of an indexer, and of attention to the tokens that it chooses.

A row is described by its new tokens, which are its last positions, and by kv_len, the number of cached tokens after
these are written.

Legend:
    R  rows
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ridgeline.kernels.attention.expanded.cost import LEAST_TOKENS
from ridgeline.kernels.attention.paged.cost import visible
from ridgeline.kernels.base.cost import Cost

PLACE_BYTES, WORD_BYTES = 4, 8
SLOWER = 2.0  # a FLOP with gathered latents beside one under a mask: 156 and 311 to 343 TFLOP/s (log, 2026-11-28)
SCORE_BYTES = 128 << 20  # of the scores that a GPU holds at once
GATHERS = False  # on Hopper chosen vectors are gathered first (gathered.py): that has not run on a GPU yet
GATHERED_BYTES = 256 << 20  # of chosen vectors that are gathered at once: those of 113 tokens of DeepSeek-V3.2


def index_keys_cost(tokens: int, *, heads: int, dim: int, itemsize: float, key_itemsize: float | None = None) -> Cost:
    """Count each token's key and its queries as read once and written once, and an int32 place as read. key_itemsize:
    the bytes of a cached number, its part of a scale included, if these are others."""
    kept = itemsize if key_itemsize is None else key_itemsize
    return Cost(tokens * ((2 * heads + 1) * dim * itemsize + dim * kept + PLACE_BYTES), 0.0)


def index_topk_cost(
    num_tokens_R: ArrayLike,
    kv_len_R: ArrayLike,
    *,
    heads: int,
    dim: int,
    count: int,
    itemsize: float,
    key_itemsize: float | None = None,
) -> Cost:
    """Count queries and weights as read, every cached key that a row can see as read once, and the chosen places as
    written. FLOPs are those of the scores, 2 · dim + 2 per head and visible pair. Rows with no more than `count` tokens
    are not scored: all of their tokens are chosen. key_itemsize: as in `index_keys_cost`."""
    new_R, kv_R = np.asarray(num_tokens_R, np.float64), np.asarray(kv_len_R, np.float64)
    written = float(new_R.sum()) * count * PLACE_BYTES
    scored_R = kv_R > count
    if not scored_R.any():
        return Cost(written, 0.0)
    pairs, keys = visible(new_R[scored_R], kv_R[scored_R], None)
    kept = itemsize if key_itemsize is None else key_itemsize
    read = float(new_R[scored_R].sum()) * heads * (dim + 1) * itemsize + keys * dim * kept
    return Cost(read + written, 2.0 * (dim + 1) * heads * pairs)


def choice_bits_cost(tokens: int, *, words: int, count: int) -> Cost:
    """Count the places as read, and the words as written twice, since all are 0 first."""
    return Cost(tokens * (count * PLACE_BYTES + 2 * words * WORD_BYTES), 0.0)


def attended_pairs(num_tokens_R: ArrayLike, kv_len_R: ArrayLike, count: int) -> float:
    """Return the number of (query, token) pairs that attention computes: a query sees `count` tokens at most."""
    new_R, kv_R = np.asarray(num_tokens_R, np.float64), np.asarray(kv_len_R, np.float64)
    few_R = np.clip(count - (kv_R - new_R), 0, new_R)  # queries that see up to `count`
    first_R = kv_R - new_R + 1
    return float((few_R * first_R + few_R * (few_R - 1) / 2 + (new_R - few_R) * count).sum())


def sparse_attention_cost(
    num_tokens_R: ArrayLike,
    kv_len_R: ArrayLike,
    *,
    num_heads: int,
    rank: int,
    rope_dim: int,
    count: int,
    itemsize: float,
) -> Cost:
    """Count queries and places as read, outputs as written, and each cached vector as read once, but no more than all
    that the row's queries choose. FLOPs are those of the two products, for the chosen pairs alone."""
    new_R, kv_R = np.asarray(num_tokens_R, np.float64), np.asarray(kv_len_R, np.float64)
    width, tokens = rank + rope_dim, float(new_R.sum())
    vectors = float(np.minimum(kv_R, new_R * count).sum())
    moved = tokens * num_heads * (width + rank) * itemsize + vectors * width * itemsize + tokens * count * PLACE_BYTES
    return Cost(moved, 2.0 * (width + rank) * num_heads * attended_pairs(new_R, kv_R, count))


def worth_masking(
    num_tokens_R: ArrayLike, kv_len_R: ArrayLike, *, count: int, key_dim: int, rope_dim: int, value_dim: int, rank: int
) -> np.ndarray:
    """Return True for each row that takes less time with keys and values made for all of its cached tokens, and a mask
    of those that are chosen, than with chosen latents alone: bool [R].

    A pair of query and key takes 2 · (key_dim + rope_dim + value_dim) FLOPs a head with keys and values made, and
    2 · (2 · rank + rope_dim) against a latent, but a query has no more than `count` of the latter. What was cached
    before is made again; for the step's own tokens that costs what queries and results do against latents.
    """
    tokens_R, kv_R = np.asarray(num_tokens_R, np.float64), np.asarray(kv_len_R, np.float64)
    pairs_R = tokens_R * kv_R - tokens_R * (tokens_R - 1) / 2
    few_R = np.clip(count - (kv_R - tokens_R), 0, tokens_R)
    chosen_R = few_R * (kv_R - tokens_R) + few_R * (few_R + 1) / 2 + (tokens_R - few_R) * count
    all_R = (key_dim + rope_dim + value_dim) * pairs_R + rank * (key_dim + value_dim) * (kv_R - tokens_R)
    found: np.ndarray = all_R < SLOWER * (2 * rank + rope_dim) * chosen_R
    return found & (tokens_R >= LEAST_TOKENS)


def masked_words(longest: int, *, count: int, key_dim: int, rope_dim: int, value_dim: int, rank: int) -> int:
    """Return the most words of 64 bits that a token's mask has where `worth_masking` says so: its row has at least half
    as many pairs as tokens times cached tokens."""
    most = 2 * SLOWER * count * (2 * rank + rope_dim) / (key_dim + rope_dim + value_dim)
    return -(-min(longest, int(most)) // 64)


def sparse_bytes(max_tokens: int, longest: int, count: int, vector_bytes: int) -> int:
    """Return the most memory that the chosen places of a step take, the scores that they are chosen by, and the chosen
    vectors that are gathered, on a GPU. Rows of up to `count` tokens are among them: in captured graphs, and where bits
    must not depend on chunks."""
    gathered = min(GATHERED_BYTES, max_tokens * count * vector_bytes) if GATHERS else 0
    return max_tokens * min(count, longest) * PLACE_BYTES + max(SCORE_BYTES, 4 * longest) + gathered
