"""The figures of a scheduler that the server shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ridgeline.core.plan.request import Preemption
from ridgeline.engine.cache.checkpoints import Counts

N = TypeVar("N", int, float)
SHARED = ("disk_blocks", "disk_bytes", "disk_capacity_bytes")  # of `below`: of the directory, whoever uses it
NOW = ("used", "size", *SHARED)  # no counts


@dataclass(frozen=True)
class Figures:
    """A scheduler's requests, its cache's pages, the tokens that were looked up there, and those that were found.

    group_hits: by cache group, after how many of these tokens it could have gone on by itself.
    checkpoints: the states that are kept, made, given up and begun from; None if no group keeps any.
    drafts: rows that verified some ("drafts"), how many they verified ("draft_tokens"), how many of these were right
        ("accepted_tokens"), at which place behind the last token ("accepted_tokens_per_pos: 0", …), and how many
        seconds they saved ("seconds_saved"); None if no row may.
    policy: counts of the scheduling policy, by name.
    below: counts of the tier in the host's memory, by name (`HostTier.figures`); None if there is none.
    pictures: those whose vectors steps needed ("queries"), those of them whose vectors were there ("hits"), and how
        many requests' pictures no step has needed yet ("waiting"); None if the model sees none.
    """

    running: int
    waiting: int
    pages_used: int
    num_pages: int
    queried_tokens: int
    hit_tokens: int
    preemptions: Counter[Preemption]
    group_hits: Counter[str]
    checkpoints: Counts | None = None
    drafts: Mapping[str, float] | None = None
    policy: Mapping[str, float] = field(default_factory=dict)
    below: Mapping[str, float] | None = None
    pictures: Mapping[str, int] | None = None

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            self.running + other.running,
            self.waiting + other.waiting,
            self.pages_used + other.pages_used,
            self.num_pages + other.num_pages,
            self.queried_tokens + other.queried_tokens,
            self.hit_tokens + other.hit_tokens,
            self.preemptions + other.preemptions,
            Counter(_added(self.group_hits, other.group_hits)),
            None if self.checkpoints is None or other.checkpoints is None else self.checkpoints + other.checkpoints,
            None if self.drafts is None or other.drafts is None else _added(self.drafts, other.drafts),
            _added(self.policy, other.policy),
            None if self.below is None or other.below is None else _below(self.below, other.below),
            None if self.pictures is None or other.pictures is None else _added(self.pictures, other.pictures),
        )

    def after(self, before: Figures) -> Figures:
        """Return the counts of both. What is there now, as requests and pages, stays as it is here."""
        both = self + before
        checkpoints = both.checkpoints
        if checkpoints is not None and self.checkpoints is not None:
            checkpoints = checkpoints._replace(kept=self.checkpoints.kept)
        below = both.below
        if below is not None and self.below is not None:
            below = {**below, **{name: self.below[name] for name in NOW if name in self.below}}
        pictures = both.pictures
        if pictures is not None and self.pictures is not None:
            pictures = {**pictures, "waiting": self.pictures["waiting"]}
        return replace(
            both,
            pictures=pictures,
            running=self.running,
            waiting=self.waiting,
            pages_used=self.pages_used,
            num_pages=self.num_pages,
            checkpoints=checkpoints,
            below=below,
        )


def _below(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    """Return the sums by name, but of a disk's directory the larger figure."""
    return {**_added(a, b), **{name: max(a.get(name, 0), b.get(name, 0)) for name in SHARED if name in {**a, **b}}}


def _added(a: Mapping[str, N], b: Mapping[str, N]) -> dict[str, N]:
    """Return the sums by name; those of 0 and below are kept, unlike a Counter's."""
    return {name: a.get(name, 0) + b.get(name, 0) for name in dict.fromkeys((*a, *b))}
