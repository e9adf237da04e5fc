"""The least work of mel spectra."""

from __future__ import annotations

from math import log2

from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.base.sounds import FRAME, HOP


def log_mel_cost(windows: float, samples: int, bands: int) -> Cost:
    """Count float32 samples as read and bands as written once. A frame takes a fast transform of real numbers
    (2.5 n log2 n), and each frequency is in two bands at most."""
    frames = windows * samples / HOP
    flops = frames * (2.5 * FRAME * log2(FRAME) + FRAME + 3 * FRAME / 2 + 4 * FRAME / 2 + bands)
    return Cost(4 * (windows * samples + frames * bands), flops)
