"""Scheduling policies: one file each. A policy gives every request its place; the rest follows.

Requests get budget, slots and blocks in that order, and when blocks run out the running request with the last place is
preempted. Nothing is taken from running requests for a waiting one, unless the policy says that they are lower.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from ridgeline.core.plan.request import Request
from ridgeline.core.registry import Registry
from ridgeline.engine.sequence import Sequence


class Policy(Protocol):
    preempts: bool  # whether any request may take the place of another

    def order(self, request: Request, arrival_index: int) -> tuple:
        """Sort key: smaller is served first. Must differ between requests (end it with arrival_index)."""

    def begin(self, seq: Sequence) -> None:
        """Note that a waiting request has started."""

    def entitled(self, waiting: Iterable[Sequence], running: Collection[Sequence]) -> Sequence | None:
        """Return the waiting request that should come before the first, if that cannot start."""

    def promote(self, seq: Sequence) -> tuple:
        """Return the order with which an entitled request comes first."""

    def lower(self, waiting: Sequence, running: Collection[Sequence]) -> list[Sequence]:
        """Return the running requests that may be preempted for a waiting one, in their order."""

    def outranked(self, seq: Sequence) -> bool:
        """Return True if requests of a rank before its own have come, as more may."""

    def keeping(self, running: Collection[Sequence]) -> list[Sequence]:
        """Return the running requests in the order in which they keep their blocks, where these are lacking."""


POLICIES = Registry(
    "scheduling policy",
    {
        "fcfs": "ridgeline.engine.policy.fcfs:FCFS",
        "priority": "ridgeline.engine.policy.priority:Priority",
    },
)
