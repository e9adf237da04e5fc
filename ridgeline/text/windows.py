"""Overlapping windows, in which a text longer than a model's context is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Window(NamedTuple):
    """The tokens start … end of a text. Those from `scored` on were in no window before."""

    start: int
    scored: int
    end: int


def windows(num_tokens: int, window: int, stride: int) -> Iterator[Window]:
    """Cut `num_tokens` tokens into windows of at most `window` tokens. Each token but the first, which nothing
    precedes, is scored exactly once.

    The first window scores all its tokens. A later one scores its last `stride` tokens, so that each has at least
    `window - stride` tokens before it; `window` is above `stride`.
    """
    scored = 1
    while scored < num_tokens:
        end = min(num_tokens, scored + stride if scored > 1 else window)
        yield Window(max(0, end - window), scored, end)
        scored = end
