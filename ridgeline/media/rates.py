"""Samples in another rate.

Legend:
    N  samples of a sound
    K  weights of an output, for each fraction of a sample at which outputs lie
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

import numpy as np

ZEROS = 32  # crossings of zero on each side of the kernel
ROLL = 0.96  # of half the lower rate: above it the kernel falls off
BETA = 9.0  # of Kaiser's window: what is folded back is some 90 dB weaker
AT_ONCE = 1 << 16  # outputs


def resampled(samples_N: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Return float32 samples in the rate `wanted`, by a sinc under Kaiser's window; as many as its seconds hold."""
    if rate == wanted or not len(samples_N):
        return samples_N.astype(np.float32, copy=False)
    common = gcd(rate, wanted)
    up, down = wanted // common, rate // common
    kernels, reach = _kernels(up, down)
    padded = np.pad(samples_N.astype(np.float32, copy=False), reach)
    count = -(-len(samples_N) * up // down)
    found = np.empty(count, np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach)
    for start in range(0, count, AT_ONCE):
        place, fraction = np.divmod(np.arange(start, min(start + AT_ONCE, count), dtype=np.int64) * down, up)
        found[start : start + len(place)] = np.einsum("nk,nk->n", windows[place + 1], kernels[fraction])
    return found


@lru_cache(8)
def _kernels(up: int, down: int) -> tuple[np.ndarray, int]:
    """Return the weights of inputs around an output, [up, K], and how many lie on each side."""
    cut = ROLL * min(1.0, up / down)
    reach = int(np.ceil(ZEROS / cut))
    distance_UK = np.arange(1 - reach, reach + 1) - np.arange(up)[:, None] / up
    inside = np.sqrt(np.clip(1 - (distance_UK / reach) ** 2, 0, None))
    return (cut * np.sinc(cut * distance_UK) * np.i0(BETA * inside) / np.i0(BETA)).astype(np.float32), reach
