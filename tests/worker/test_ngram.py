"""Prompt lookup against a search that looks at every place."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.worker.speculation.ngram import NGram


def by_hand(known: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """Return what follows the best of all earlier places, and goes on as the text does between that place and its
    end."""
    best = (0, 0)
    for place in range(1, len(known)):
        shared = 0
        while shared < min(longest, place) and known[place - 1 - shared] == known[-1 - shared]:
            shared += 1
        best = max(best, (shared, place))
    if best[0] < shortest:
        return []
    text = list(known)
    for _ in range(count):
        text.append(text[best[1] + len(text) - len(known)])
    return text[len(known) :]


@given(
    known=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    shortest=st.integers(1, 4),
    more=st.integers(0, 4),
    count=st.integers(1, 9),
)
def test_drafts_are_what_followed_the_longest_match(known: list[int], shortest: int, more: int, count: int) -> None:
    found = NGram(shortest, shortest + more).propose(np.array(known, np.int32), count)
    assert found.tolist() == by_hand(known, shortest, shortest + more, count)


def test_a_text_that_repeats_itself_goes_on_beyond_what_is_known() -> None:
    known = np.array([9, 1, 2, 1, 2], np.int32)
    assert NGram(2, 2).propose(known, 5).tolist() == [1, 2, 1, 2, 1]
    assert NGram(3, 3).propose(known, 5).tolist() == []
