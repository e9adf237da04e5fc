"""Prompt lookup: what a text ends with stood in it before, so what followed then may follow again.

After Saxena, "Prompt Lookup Decoding" (2023). A match may overlap its own continuation, so a text that repeats itself
is continued for as long as drafts are wanted.

A search looks at every known token once, and reads four bytes of each: 1/32,000 of what attention reads of the same
tokens in a model with 128 KiB of keys and values a token. So no index of the text is kept.

Legend:
    N  known tokens
    X  places that match
    K  drafts
"""

from __future__ import annotations

import numpy as np


class NGram:
    """Finds drafts by the last `shortest` to `longest` tokens."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest

    def propose(self, known_N: np.ndarray, count: int) -> np.ndarray:
        """Return `count` drafts of what follows the known tokens, or none.

        Of the places where the same tokens stand, the one wins that shares most of the tokens before it, and of these
        the latest.
        """
        end = len(known_N)
        at_X = np.flatnonzero(known_N[: end - 1] == known_N[-1]) + 1 if end > 1 else np.empty(0, np.intp)
        shared = min(1, len(at_X))
        for length in range(2, self._longest + 1):
            longer_X = at_X[at_X >= length]
            longer_X = longer_X[known_N[longer_X - length] == known_N[end - length]]
            if not len(longer_X):
                break
            at_X, shared = longer_X, length
        if shared < self._shortest:
            return known_N[:0]
        start = int(at_X[-1])
        return known_N[start + np.arange(count) % (end - start)]
