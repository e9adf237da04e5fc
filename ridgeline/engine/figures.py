"""The figures of a scheduler that the server shows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ridgeline.core.request import Preemption


@dataclass(frozen=True)
class Figures:
    """A scheduler's requests, its cache's pages, the tokens that were looked up there, and those that were found."""

    running: int
    waiting: int
    pages_used: int
    num_pages: int
    queried_tokens: int
    hit_tokens: int
    preemptions: Counter[Preemption]

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            self.running + other.running,
            self.waiting + other.waiting,
            self.pages_used + other.pages_used,
            self.num_pages + other.num_pages,
            self.queried_tokens + other.queried_tokens,
            self.hit_tokens + other.hit_tokens,
            self.preemptions + other.preemptions,
        )
