"""The least work of linear attention over rows of unlike lengths.

Legend:
    R  rows
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ridgeline.kernels.base.cost import Cost

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


def training_cost(
    num_tokens_R: ArrayLike, *, heads: int, key_width: int, value_width: int, itemsize: float, decay_bytes: float
) -> Cost:
    """Count a forward pass over rows that begin with zeros, and a backward pass with twice its FLOPs. The latter reads
    the inputs and the outputs' gradients, and writes a gradient of each input."""
    forward = linear_attention_cost(
        num_tokens_R, heads=heads, key_width=key_width, value_width=value_width, itemsize=itemsize,
        decay_bytes=decay_bytes,
    )  # fmt: skip
    tokens = float(np.asarray(num_tokens_R, np.float64).sum())
    moved = tokens * (itemsize * heads * (4 * key_width + 3 * value_width) + 2 * decay_bytes)
    return forward + Cost(moved, 2 * forward.flops)


def chunked_costs(
    tokens: float, *, heads: int, key_width: int, value_width: int, itemsize: float, decay_bytes: float, backward: bool
) -> dict[str, Cost]:
    """Return the work of each kernel of triton_training.py, forward or backward: what it asks of memory if its programs
    find what they share in the cache. A state of every chunk is written and read."""
    keys, values = heads * key_width, heads * value_width
    state, square = heads * key_width * value_width, heads * CHUNK
    k, v, s, a = itemsize * keys, itemsize * values, itemsize * state / CHUNK, itemsize * square  # bytes of a token
    wide = 4.0  # bytes of a float32
    counted = {
        "fade": (4 * k + decay_bytes, 0.0),
        "within": (2 * k + decay_bytes + a, 2.0 * CHUNK * keys),
        "states": (k + v + s, 2.0 * state),
        "outputs": (k + 2 * v + a + s, 2.0 * state + 2.0 * CHUNK * values),
    }
    if backward:
        del counted["outputs"]
        counted |= {
            "states": (2 * k + 2 * v + 2 * s, 4.0 * state),
            "dv": (k + 3 * v + a + s + wide * square, 2.0 * state + 4.0 * CHUNK * values),
            "d_within": (2 * k + decay_bytes + wide * (square + 2 * keys), 4.0 * CHUNK * keys),
            "dk": (4 * k + 2 * v + 2 * s + decay_bytes + wide * 3 * keys, 4.0 * state),
        }
    return {name: Cost(tokens * moved, tokens * flops) for name, (moved, flops) in counted.items()}
