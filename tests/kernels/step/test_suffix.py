"""Suffix decoding drafts what followed most often, as a count of all substrings of the text finds it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.kernels.step.lookup.suffix import continued_by_share


def places(text: list[int], part: list[int]) -> list[int]:
    """The places behind this part of the text, without the one at the text's end."""
    size = len(part)
    return [at + size for at in range(len(text) - size) if text[at : at + size] == part]


def counted(text: list[int], match: list[int], count: int, least: float) -> tuple[list[int], float]:
    """The likeliest drafts behind a match, and their score."""
    drafts, probability, score = list[int](), 1.0, 0.0
    while len(drafts) < count:
        at = places(text, match + drafts)
        if len(at) == 1:
            begun = at[0] - len(drafts)
            period = text[begun:]
            drafts.append(period[len(drafts) % len(period)])
            while len(drafts) < count:
                drafts.append(period[len(drafts) % len(period)])
                score += probability
            return drafts, score + probability
        if not at:
            break
        follows = [text[place] for place in at]
        often = max(follows.count(token) for token in follows)
        token = next(token for token in reversed(follows) if follows.count(token) == often)
        probability *= often / len(follows)
        if probability < least:
            break
        drafts.append(token)
        score += probability
    return drafts, score


def best(text: list[int], count: int, longest: int, factor: float, least: float) -> tuple[list[int], float, int]:
    found: tuple[list[int], float, int] = ([], 0.0, 0)
    for length in range(1, longest + 1):
        if length > len(text) or not places(text, text[-length:]):
            break
        drafts, score = counted(text, text[-length:], min(count, int(factor * length + 1e-6)), least)
        if drafts and score >= found[1] - 1e-9:
            found = drafts, score, length
    return found


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    count=st.integers(0, 6),
    longest=st.integers(1, 9),
    factor=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    least=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
)
def test_drafts_are_those_that_followed_most_often(
    text: list[int], count: int, longest: int, factor: float, least: float
) -> None:
    drafts, shared = continued_by_share(np.array(text, np.int32), count, longest, factor, least)
    wanted, score, length = best(text, count, longest, factor, least)
    if drafts.tolist() != wanted:  # sums of the same numbers in another order may part two that are equal
        found = counted(text, text[len(text) - shared :], min(count, int(factor * shared + 1e-6)), least)
        assert (drafts.tolist(), round(found[1], 6)) == (found[0], round(score, 6))
    else:
        assert (shared > 0) == (length > 0)


def test_the_frequent_continuation_wins_over_the_latest() -> None:
    text = [1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 4, 9, 1, 2]
    assert continued_by_share(np.array(text), 2, 8, 1.0, 0.1)[0].tolist() == [3, 9]
    assert continued_by_share(np.array(text), 2, 8, 1.0, 0.7)[0].tolist() == []
