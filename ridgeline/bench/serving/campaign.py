"""Servers measured one after the other with the same work, and what was found kept at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ridgeline.bench.serving.figures import Point, rate_name
from ridgeline.bench.serving.server import Server
from ridgeline.bench.serving.session import OnProgress, Session
from ridgeline.bench.serving.start import Target, Up
from ridgeline.core.errors import RidgelineError

Begin = Callable[[Up, float], Session]  # a server that is up, and the moment at which all must be over


@dataclass
class Curve:
    """One server's points, in the order of the rates. start: seconds it took to come up (0: it was). notes: in the
    end, what there is to say. died: it was gone by then."""

    label: str
    server: Server
    start: float
    points: list[Point] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    died: bool = False


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """begin: a session with one of the targets. within: seconds for all together (0: any); each gets an equal share of
    what is left when its turn comes. warmup: requests before. complain: is told of a target that failed, where there
    are others."""

    targets: Sequence[Target]
    begin: Begin
    complain: Callable[[str], None]
    within: float = 0.0
    warmup: int = 2

    def run(self, watch: Callable[[str], OnProgress]) -> Iterator[Curve]:
        """A curve again whenever it has got a point, or a note. watch: from a target's label to who is told of
        progress. Raises a RidgelineError if the only target fails."""
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
            if left := session.rates[len(curve.points) :]:
                curve.notes.append(f"{curve.label}: no time was left for {', '.join(map(rate_name, left))}.")
            if (death := up.ended()) is not None:
                curve.notes.append(f"{curve.label} {death}")
                curve.died = True
            if curve.notes:
                yield curve
