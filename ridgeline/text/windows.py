"""A text longer than a model's context is read in windows that overlap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Window(NamedTuple):
    """Tokens start … end of a text; those from `scored` on were in no window before."""

    start: int
    scored: int
    end: int


def windows(num_tokens: int, window: int, stride: int) -> Iterator[Window]:
    """Cut `num_tokens` tokens; together the windows score each but the first (nothing precedes it) exactly once.

    The first window scores all it has; later ones their last `stride` tokens, which have at least `window - stride`
    tokens before them. window: tokens of the longest, above stride.
    """
    scored = 1
    while scored < num_tokens:
        end = min(num_tokens, scored + stride if scored > 1 else window)
        yield Window(max(0, end - window), scored, end)
        scored = end
