"""Random blocks of ggml's formats, for tests of what reads them."""

from __future__ import annotations

import numpy as np

from ridgeline.weights.formats.gguf_file import TENSOR_TYPES

SIGNS = ("TQ1_0", "TQ2_0", "MXFP4")  # zeros have none there, or another one than here


def random_blocks(number: int, count: int) -> np.ndarray:
    """Blocks of random bytes. Ternary ones have finite scales. MXFP4's are no NaN, for which ggml has a number."""
    type = TENSOR_TYPES[number]
    data = np.random.default_rng(number).integers(0, 256, (count, type.bytes), dtype=np.uint8)
    if type.name in ("TQ1_0", "TQ2_0"):
        data[:, -1] &= 0xBF
    elif type.name == "MXFP4":
        data[:, 0] = np.minimum(data[:, 0], 254)
    return data
