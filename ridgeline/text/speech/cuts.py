"""Long sounds as windows: cut where it is most quiet.

Legend:
    N  samples
    Q  stretches of LISTENED samples, one after the other
"""

from __future__ import annotations

import numpy as np

LISTENED = 1600  # samples whose energy is compared: a tenth of a second
SEARCHED = 0.2  # of a window, before its end, in which a cut is looked for


def cut_at_silence(samples_N: np.ndarray, most: int) -> list[tuple[int, int]]:
    """Return windows of at most so many samples, as their begins and ends. Each but the last ends in the middle of the
    stretch with the least energy among the last ones that it could have."""
    found, start = list[tuple[int, int]](), 0
    listened = min(LISTENED, max(most // 10, 1))
    while len(samples_N) - start > most:
        count = max(int(most * SEARCHED) // listened, 1)
        first = start + most - count * listened
        stretch_QN = samples_N[first : first + count * listened].reshape(count, listened)
        energy_Q = np.einsum("qn,qn->q", stretch_QN, stretch_QN)
        best = int(count - 1 - energy_Q[::-1].argmin())  # the last of equal ones
        end = first + best * listened + listened // 2
        found.append((start, end))
        start = end
    return [*found, (start, len(samples_N))]
