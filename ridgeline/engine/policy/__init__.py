"""Scheduling policies: one file each. A policy gives every request its place; the rest follows.

Requests get budget, slots and blocks in that order, and when blocks run out the running request with the last place is
preempted. Nothing is taken from running requests for a waiting one, unless the policy says that they are lower.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Protocol

import numpy as np

from ridgeline.core.plan.request import Request
from ridgeline.core.plan.step import Rows
from ridgeline.core.registry import Registry
from ridgeline.engine.policy.base import Cost
from ridgeline.engine.sequence import Sequence
from ridgeline.engine.waiting import Lane


class Policy(Protocol):
    """A policy is made with `policy.base.Terms`. `policy.base.Ordered` has all of this but `order`."""

    fell: bool  # whether waiting requests may have lower places than when they came to wait; the scheduler clears it
    preempts: bool  # whether any request may take the place of another
    counts: bool  # whether `serve` is to be called
    itl: float | None  # seconds between tokens that a running request was promised, the least

    def check(self, request: Request) -> None:
        """Raise CannotPromise for a request whose objective cannot be met."""

    def order(self, request: Request, arrival_index: int) -> tuple:
        """Sort key: smaller is served first. Must differ between requests (end it with arrival_index)."""

    def lane(self, seq: Sequence) -> Hashable:
        """Return the name of the lane in which a request waits, by its order."""

    def new_lane(self, name: Hashable) -> Lane:
        """Return an empty lane."""

    def place(self, seq: Sequence) -> tuple:
        """Return the request's order among those of all lanes, as of now."""

    def come(self, seq: Sequence) -> None:
        """Note a new request."""

    def wait(self, seq: Sequence) -> None:
        """Note that a request begins to wait: a new one, or one that was preempted."""

    def begin(self, seq: Sequence) -> None:
        """Note that a waiting request has started."""

    def left(self, seq: Sequence) -> None:
        """Note that a running request has left its slot."""

    def dropped(self, seq: Sequence) -> None:
        """Note that a waiting request has ended."""

    def ended(self, seq: Sequence) -> None:
        """Note the end of a request, wherever it was."""

    def serve(self, seqs: list[Sequence], rows: Rows, kv_len_R: np.ndarray) -> None:
        """Note a plan. kv_len_R: the cached tokens of its rows after it."""

    def ran(self) -> None:
        """Note that the oldest plan in flight has run."""

    def failed(self, seqs: list[Sequence], rows: Rows, kv_len_R: np.ndarray) -> None:
        """Note that the oldest plan in flight, of which `serve` was told, did not run."""

    def due(self) -> list[tuple[Sequence, tuple]]:
        """Return waiting requests that have another order by now, with it."""

    def overdrawn(self, running: Callable[[], Collection[Sequence]]) -> list[Sequence]:
        """Return the running requests that may not be served any more while others wait."""

    def held(self, seq: Sequence) -> bool:
        """Return True if a waiting request must not start in this plan."""

    def entitled(self, waiting: Iterable[Sequence], lanes: Collection[Hashable]) -> Sequence | None:
        """Return the waiting request that should come before the first, if that cannot start. waiting: the first of
        each lane, in their order. lanes: the names of all lanes, some of which may be empty."""

    def promote(self, seq: Sequence) -> tuple:
        """Return the order with which an entitled request comes first."""

    def lower(
        self, waiting: Sequence, running: Callable[[], Collection[Sequence]], cost: Cost = lambda seq: 0.0
    ) -> list[Sequence]:
        """Return the running requests that may be preempted for a waiting one; the last one goes first. cost: what
        their blocks cost to have again, which decides between those that are equally entitled."""

    def outranked(self, seq: Sequence) -> bool:
        """Return True if requests of a rank before its own have come, as more may."""

    def keeping(self, running: Collection[Sequence], cost: Cost = lambda seq: 0.0) -> list[Sequence]:
        """Return the running requests in the order in which they keep their blocks, where these are lacking. cost: as
        `lower` takes it."""

    def figures(self) -> Mapping[str, float]:
        """Return further counts of this policy, by name."""


POLICIES = Registry(
    "scheduling policy",
    {
        "fcfs": "ridgeline.engine.policy.fcfs:FCFS",
        "priority": "ridgeline.engine.policy.priority:Priority",
        "vtc": "ridgeline.engine.policy.vtc:VTC",
        "drr": "ridgeline.engine.policy.drr:DRR",
        "dlpm": "ridgeline.engine.policy.dlpm:DLPM",
        "srpt": "ridgeline.engine.policy.srpt:SRPT",
        "slo": "ridgeline.engine.policy.slo:SLO",
    },
)
