"""The least work of the gated delta rule over rows of unlike lengths.

Legend:
    R  rows
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ridgeline.kernels.base.cost import Cost

CHUNK = 64  # tokens; products over longer chunks read less and compute more


def gated_delta_cost(
    num_tokens_R: ArrayLike, *, heads: int, value_heads: int, key_width: int, value_width: int, itemsize: float
) -> Cost:
    """Count queries, keys, values and the decays' and strengths' numbers as read, outputs as written, and each row's
    state, in float32, as read once and written once.

    FLOPs are those of whichever form has fewer. Token by token, a value head reads its state for the key and for the
    query, and adds to it: 6 · key_width · value_width. In chunks of n tokens three products with the state have as
    many, and four within a chunk 2 · n each for a query, a key or a value; those that are triangular count half. The
    products of keys with keys and with queries are counted once for all value heads of a key head.
    """
    num_tokens_R = np.asarray(num_tokens_R, np.float64)
    tokens, rows = float(num_tokens_R.sum()), int((num_tokens_R > 0).sum())
    state = value_heads * key_width * value_width
    vectors = 2 * heads * key_width + 2 * value_heads * value_width + 2 * value_heads
    within_R = np.minimum(num_tokens_R, CHUNK) - 1  # tokens of a chunk beside the one that is counted
    pairs = float((num_tokens_R * within_R).sum()) / 2
    flops = 6.0 * state * tokens + 4.0 * pairs * (heads * key_width + value_heads * value_width)
    return Cost(itemsize * tokens * vectors + 8.0 * state * rows, flops)
