"""Measurement of servers one after the other with the same work. Results are kept at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ridgeline.core.errors import RidgelineError
from ridgeline_bench.serving.figures import Point, rate_name
from ridgeline_bench.serving.server import Server
from ridgeline_bench.serving.session import OnProgress, Session
from ridgeline_bench.serving.start import Target, Up

Begin = Callable[[Up, float], Session]  # a server that is up, and the moment at which everything must be over


@dataclass
class Curve:
    """The points of one server, in the order of the rates. `start` is the seconds it took to come up (0: it was up).
    `notes` are complete in the end. `died` means that the server was gone by then."""

    label: str
    server: Server
    start: float
    points: list[Point] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    died: bool = False


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """The measurement of several targets.

    `begin` starts a session with one of them. `within` is the seconds for all together (0: any); each gets an equal
    share of what is left when its turn comes. `warmup` is the number of requests before. `complain` is called for a
    target that failed, if there are others.
    """

    targets: Sequence[Target]
    begin: Begin
    complain: Callable[[str], None]
    within: float = 0.0
    warmup: int = 2

    def run(self, watch: Callable[[str], OnProgress]) -> Iterator[Curve]:
        """Yield a curve again whenever it has got a point or a note. `watch` returns the function called on progress,
        by a target's label.

        Raise a RidgelineError if the only target fails.
        """
        end = time.monotonic() + self.within if self.within else math.inf
        for number, target in enumerate(self.targets):
            now = time.monotonic()
            until = now + (end - now) / (len(self.targets) - number)
            try:
                yield from self._one(target, until, watch(target.label))
            except RidgelineError as error:
                if len(self.targets) == 1:
                    raise
                self.complain(str(error))

    def _one(self, target: Target, until: float, on_progress: OnProgress) -> Iterator[Curve]:
        with target.up(until) as up:
            session = self.begin(up, until)
            server = session.server
            curve = Curve(target.label or f"{server.engine} {server.version}".strip(), server, up.seconds)
            session.warm_up(self.warmup)
            for found in session.measure(on_progress):
                curve.points.append(found)
                yield curve
            if left := session.sending.rates[len(curve.points) :]:
                curve.notes.append(f"{curve.label}: no time was left for {', '.join(map(rate_name, left))}.")
            if (death := up.ended()) is not None:
                curve.notes.append(f"{curve.label} {death}")
                curve.died = True
            if curve.notes:
                yield curve
