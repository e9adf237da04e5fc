"""The part that all policies share: requests in one order, and no further notes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ridgeline.core.clock import MONOTONIC, Clock
from ridgeline.core.plan.request import Request
from ridgeline.core.plan.step import Rows
from ridgeline.core.settings.policies import PolicySettings
from ridgeline.engine.price import Price
from ridgeline.engine.sequence import Sequence, Status
from ridgeline.engine.waiting import Lane

Cost = Callable[[Sequence], float]  # predicted milliseconds to have a running request's blocks again, for each of them
MOST_MOVED = 64  # requests that get another place in one plan, so that a step stays short


class Terms(NamedTuple):
    """The facts that a policy is made with."""

    settings: PolicySettings = PolicySettings()
    price: Price = Price()
    clock: Clock = MONOTONIC


class Ordered:
    """A policy that serves requests by the `order` they were given, which subclasses say. It is told of all that
    happens to requests (`wait`, `begin`, `left`, `dropped`).

    preempts: some request may take the place of another. counts: `serve` wants to know of steps. itl: as in `Policy`.
    aged: the moment after which a request that waits is to be given another place, with its order until then.
    fell: places of waiting requests may be lower than they were when these came to wait.
    """

    fell = False
    preempts = False
    counts = False
    itl: float | None = None

    def __init__(self, terms: Terms | None = None) -> None:
        self.settings, self.price, self.clock = terms or Terms()
        self.aged: list[tuple[float, tuple, Sequence]] = []

    def check(self, request: Request) -> None:
        """Raise CannotPromise for a request whose objective cannot be met."""

    def lane(self, seq: Sequence) -> Hashable:
        return seq.order[0]

    def new_lane(self, name: Hashable) -> Lane:
        return Lane(name)

    def place(self, seq: Sequence) -> tuple:
        return seq.order

    def come(self, seq: Sequence) -> None:
        pass

    def wait(self, seq: Sequence) -> None:
        pass

    def begin(self, seq: Sequence) -> None:
        pass

    def left(self, seq: Sequence) -> None:
        pass

    def dropped(self, seq: Sequence) -> None:
        pass

    def ended(self, seq: Sequence) -> None:
        pass

    def serve(self, seqs: list[Sequence], rows: Rows, kv_len_R: np.ndarray) -> None:
        pass

    def ran(self) -> None:
        pass

    def failed(self, seqs: list[Sequence], rows: Rows, kv_len_R: np.ndarray) -> None:
        pass

    def due(self) -> list[tuple[Sequence, tuple]]:
        return []

    def overdrawn(self, running: Callable[[], Collection[Sequence]]) -> list[Sequence]:
        return []

    def held(self, seq: Sequence) -> bool:
        return False

    def entitled(self, waiting: Iterable[Sequence], lanes: Collection[Hashable]) -> Sequence | None:
        return None

    def promote(self, seq: Sequence) -> tuple:
        return seq.order

    def lower(
        self, waiting: Sequence, running: Callable[[], Collection[Sequence]], cost: Cost = lambda seq: 0.0
    ) -> list[Sequence]:
        """Return those that run in the background, for a request that does not."""
        if waiting.request.background or not self.preempts:
            return []
        found = [seq for seq in running() if seq.request.background]
        return sorted(found, key=lambda seq: (-cost(seq), self.place(seq)))

    def outranked(self, seq: Sequence) -> bool:
        return False

    def keeping(self, running: Collection[Sequence], cost: Cost = lambda seq: 0.0) -> list[Sequence]:
        """Return the first in order, and then the others by their claims: of two that are equally entitled the one
        goes whose blocks cost less to have again, and of two that cost the same the later one. The first one always
        goes on, so every request ends."""
        first = min(running, key=self.place)
        return sorted(running, key=lambda seq: (seq is not first, *self.claim(seq), -cost(seq), self.place(seq)))

    def claim(self, seq: Sequence) -> tuple:
        """Return the claim of a running request to its blocks; the least one is the strongest."""
        return (seq.request.background,)

    def figures(self) -> Mapping[str, float]:
        """Return further counts of this policy, by name."""
        return {}


def still(entry: tuple[float, tuple, Sequence]) -> bool:
    """Return True if a request of `Ordered.aged` waits in the place that it had then."""
    _, order, seq = entry
    return seq.status is Status.WAITING and seq.order == order
