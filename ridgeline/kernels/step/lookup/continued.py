"""Prompt lookup in one text: what it ends with stood in it before, so what followed then may follow again.

Legend:
    N  tokens of the text
    X  places that match
"""

from __future__ import annotations

import numpy as np


def continued(known_N: np.ndarray, count: int, shortest: int, longest: int) -> tuple[np.ndarray, int]:
    """Return `count` drafts of what follows a text, or none, and how many tokens their match shares."""
    end = len(known_N)
    at_X = np.flatnonzero(known_N[: end - 1] == known_N[-1]) + 1 if end > 1 and count else np.empty(0, np.intp)
    shared = min(1, len(at_X))
    for length in range(2, longest + 1):
        longer_X = at_X[at_X >= length]
        longer_X = longer_X[known_N[longer_X - length] == known_N[end - length]]
        if not len(longer_X):
            break
        at_X, shared = longer_X, length
    if shared < shortest:
        return known_N[:0], 0
    start = int(at_X[-1])
    return known_N[start + np.arange(count) % (end - start)], shared
