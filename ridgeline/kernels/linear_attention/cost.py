"""The least work of linear attention over rows of unlike lengths.

Legend:
    R  rows
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ridgeline.core.cost import Cost

CHUNK = 64  # tokens; products over longer chunks read less and compute more


def linear_attention_cost(
    num_tokens_R: ArrayLike,
    *,
    heads: int,
    key_width: int,
    value_width: int,
    itemsize: float,
    decay_bytes: float = 0.0,
    delta: bool = False,
) -> Cost:
    """Count queries, keys, values and the decays' bytes of a token as read, outputs as written, and each row's state,
    in float32, as read once and written once.

    FLOPs are those of chunks: two products with the state, and two within a chunk, which are triangular and count half.
    delta: states are corrected, which takes one more product with the state, and two more within a chunk.
    """
    num_tokens_R = np.asarray(num_tokens_R, np.float64)
    tokens, rows = float(num_tokens_R.sum()), int((num_tokens_R > 0).sum())
    state = heads * key_width * value_width
    within_R = np.minimum(num_tokens_R, CHUNK) - 1  # tokens of a chunk beside the one that is counted
    pairs = float((num_tokens_R * within_R).sum()) / 2
    products = 2 if delta else 1
    flops = 2.0 * (products + 1) * state * tokens + 2.0 * products * pairs * heads * (key_width + value_width)
    vectors = 2 * heads * (key_width + value_width)
    return Cost(tokens * (itemsize * vectors + decay_bytes) + 8.0 * state * rows, flops)
