"""The frames of a video that are taken where its model does not say.

The rule is vLLM's: as many as there are, at most `num_frames` of them (32 unless set, -1 for all), and at most `fps`
for each second; evenly from the first to the last.
"""

from __future__ import annotations

import math

import numpy as np

DEFAULT = 32


def chosen(total: int, rate: float, num_frames: int = DEFAULT, fps: float = -1.0) -> list[int]:
    """Return indices of frames, which do not fall.

    total: frames of the file. rate: its frames a second. num_frames, fps: at most so many frames, in all and in a
    second; -1 is no bound.
    """
    wanted = total if num_frames <= 0 else min(num_frames, total)
    if fps > 0 and rate > 0:
        wanted = min(wanted, math.floor(total / rate * fps))
    wanted = max(1, wanted)
    return list(range(total)) if wanted == total else np.linspace(0, total - 1, wanted, dtype=int).tolist()
