"""Outputs that repeat themselves: where their last tokens are one pattern, several times over.

Legend:
    P  tokens of a pattern, one entry for each length that is looked for
"""

from __future__ import annotations

import numpy as np

from ridgeline.core.plan.request import RepetitionDetectionParams


class Repetition:
    """The detector of one output. A token costs one pass over the lengths of patterns.

    For each length P it counts the last tokens that each equal the one P places before. A pattern stands there
    min_count times if these are (min_count - 1) * P.
    """

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._length_P = np.arange(max(params.min_pattern_size, 1), params.max_pattern_size + 1)
        self._wanted_P = self._length_P * (params.min_count - 1)
        self._same_P = np.zeros_like(self._wanted_P)
        self._recent = np.full(params.max_pattern_size, -1, np.int64)  # a ring of the last tokens
        self._count = 0

    def take(self, token_id: int) -> bool:
        """Add a token and return True if a pattern ends with it."""
        before_P = self._recent[(self._count - self._length_P) % len(self._recent)]
        self._same_P = (self._same_P + 1) * (before_P == token_id)
        self._recent[self._count % len(self._recent)] = token_id
        self._count += 1
        return bool((self._same_P >= self._wanted_P).any())
