"""The least work of a long convolution over rows of unlike lengths.

Legend:
    R  rows
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ridgeline.core.cost import Cost


def long_convolution_cost(num_tokens_R: ArrayLike, channels: int, *, itemsize: float) -> Cost:
    """Count inputs as read, outputs as written, and the longest row's filters, in float32, as read once.

    FLOPs are those of the direct sum or of three real transforms of twice a row's length, whichever are fewer. A real
    transform of n numbers has 2.5 n log2(n), and the product between has 6 for each of the n / 2 frequencies.
    """
    tokens_R = np.asarray(num_tokens_R, np.float64)
    if not len(tokens_R):
        return Cost(0.0, 0.0)
    size_R = np.maximum(2 * tokens_R, 2)
    flops_R = np.minimum(tokens_R * (tokens_R + 1), 7.5 * size_R * np.log2(size_R) + 3 * size_R) + 2 * tokens_R
    num_bytes = 2.0 * itemsize * tokens_R.sum() * channels + 4.0 * channels * (tokens_R.max() + 1)
    return Cost(float(num_bytes), float(flops_R.sum()) * channels)
