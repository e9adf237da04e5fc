"""The events of a fleet in order of time: requests come, steps end, replicas stop and start."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.request import RequestStats
from ridgeline.engine.cache.prefix import root_hash
from ridgeline.routing import rule_of
from ridgeline.simulation.clock import VirtualClock
from ridgeline.simulation.figures import Bounds, Counts, FleetFigures, Spread
from ridgeline.simulation.replica import Replica
from ridgeline.simulation.setup import Setup
from ridgeline.simulation.traffic import Ask, Prompts, Traffic, check

MOST_REPLICAS = 1024
AUTOSCALE_EVERY = 1.0  # seconds between looks at the load


@dataclass(frozen=True, kw_only=True)
class ReplicaFailure:
    """A replica stops at a moment and is back, empty, `away` seconds later."""

    replica: int
    at: float
    away: float


@dataclass(frozen=True, kw_only=True)
class Autoscale:
    """The number of replicas follows the load: `requests` open ones for each replica, between `least` and all of them.
    start: seconds until a new one takes requests. A replica that is not needed ends what it has and leaves."""

    least: int
    requests: int
    start: float = 30.0

    def __post_init__(self) -> None:
        if self.least < 1 or self.requests < 1 or not 0 <= self.start < float("inf"):
            raise InvalidConfig(
                f"autoscaling needs at least 1 replica, 1 request each and seconds from 0, got {self.least}, "
                f"{self.requests} and {self.start!r}."
            )


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """A fleet. replicas: the most that there are. price: of one replica for an hour."""

    replicas: int = 1
    routing: str = "prefix"
    failures: Sequence[ReplicaFailure] = ()
    autoscale: Autoscale | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= MOST_REPLICAS:
            raise InvalidConfig(f"replicas must be from 1 to {MOST_REPLICAS}, got {self.replicas}.")
        if self.price is not None and not 0 < self.price <= 1e9:
            raise InvalidConfig(f"the price for an hour must be above 0 and at most 1e9, got {self.price!r}.")
        rule_of(self.routing)  # it raises InvalidConfig for an unknown one
        for each in self.failures:
            if not (0 <= each.replica < self.replicas and 0 <= each.at < float("inf") and 0 < each.away < float("inf")):
                raise InvalidConfig(
                    f"replica {each.replica} cannot fail at {each.at:g} s for {each.away:g} s; there are replicas 0 to "
                    f"{self.replicas - 1}, and times are above 0."
                )
        if self.autoscale is not None and self.autoscale.least > self.replicas:
            raise InvalidConfig(f"autoscaling cannot keep {self.autoscale.least} of {self.replicas} replicas.")


class Fleet:
    """One run. Everything in it follows from setup, plan and traffic."""

    def __init__(self, setup: Setup, plan: FleetSettings, traffic: Traffic, bounds: Bounds | None = None) -> None:
        self._setup, self._plan, self._traffic = setup, plan, traffic
        self.clock = VirtualClock()
        self.counts = Counts(bounds or Bounds(), setup.settings.lag)
        self._rule = rule_of(plan.routing)
        names = [str(g.spec.format) for g in setup.layout.groups if hasattr(g.spec, "format")]
        self._prompts = Prompts(setup.layout.block_size, root_hash("", *sorted({*names} - {"None"})))
        slow = self.counts.bounds.itl
        self.replicas = [
            Replica(setup, self.clock, self._prompts, self.counts.gaps, slow, self._ended) for _ in range(plan.replicas)
        ]
        for replica in self.replicas[plan.autoscale.least if plan.autoscale else plan.replicas :]:
            replica.up = False
        self._order = count()
        self._later: list[tuple[float, int, Ask]] = []  # requests that follow others, or wait for a replica
        self._steps: list[tuple[float, int]] = []  # the ends of steps
        self._changes = sorted(_changes(plan.failures))
        self._coming: dict[int, float] = {}  # replicas on their way, and when they are there
        self._parked: list[Ask] = []
        self._next_look = 0.0
        self.requests = self.ended = self.open = 0

    def run(self) -> FleetFigures:
        """Run until all requests have ended. Raise InvalidConfig for one that cannot run."""
        coming = self._arrivals()
        ask = next(coming, None)
        while True:
            moments = [self._steps[0][0]] if self._steps else []
            if ask is not None:
                moments.append(ask.at + self._setup.settings.lag)
            if self._later:
                moments.append(self._later[0][0])
            if not moments and not self._parked:
                break
            if self._changes:
                moments.append(self._changes[0][0])
            if self._plan.autoscale is not None and self._next_look < math.inf:
                moments.append(self._next_look)
            if not moments:
                raise InvalidConfig(f"{len(self._parked)} requests wait, and no replica will come back.")
            now = min(moments)
            self.clock.advance(max(now, self.clock.now))
            if now < self._next_look:  # something happens, so what the next look finds may differ
                self._next_look = min(self._next_look, AUTOSCALE_EVERY * (now // AUTOSCALE_EVERY + 1))
            if self._changes and self._changes[0][0] <= now:
                self._change(*self._changes.pop(0)[1:])
            elif self._plan.autoscale is not None and self._next_look <= now:
                self._look(self._plan.autoscale)
            elif self._steps and self._steps[0][0] <= now:
                self._step(heapq.heappop(self._steps)[1])
            elif self._later and self._later[0][0] <= now:
                self.open += 1
                self._arrive(heapq.heappop(self._later)[2])
            else:
                assert ask is not None
                self._count(ask)
                self.open += 1
                self._arrive(ask)
                ask = next(coming, None)
        return self._figures()

    # ---- events -----------------------------------------------------------------------------------------------

    def _arrivals(self) -> Iterator[Ask]:
        before = 0.0
        for ask in self._traffic.begin():
            if ask.at < before:
                raise InvalidConfig(f"request {ask.number} comes at {ask.at:g} s, after one at {before:g}; sort them.")
            before = ask.at
            yield ask

    def _count(self, ask: Ask) -> None:
        check(ask, self._setup.config.max_model_len)
        self.requests += 1

    def _arrive(self, ask: Ask) -> None:
        loads = {number: each.load for number, each in enumerate(self.replicas) if each.up}
        if not loads:
            self._parked.append(ask)
            return
        prompt = self._prompts.tokens(ask.prompt)
        session = str(ask.session) if ask.session >= 0 else ""
        chosen = self._rule.choose(prompt, ask.tenant, loads, session=session) if len(loads) > 1 else next(iter(loads))
        replica = self.replicas[chosen]
        idle = replica.due is None
        if not replica.add(ask, prompt):
            self.counts.refused += 1
            self._follow(ask, self.clock.now)
        elif idle:
            self._plan_step(chosen)

    def _plan_step(self, number: int) -> None:
        due = self.replicas[number].due
        if due is not None:
            heapq.heappush(self._steps, (due, number))

    def _step(self, number: int) -> None:
        self.replicas[number].step()
        self._plan_step(number)

    def _ended(self, ask: Ask, stats: RequestStats, over: int) -> None:
        self.counts.ended(ask, stats, over)
        self._follow(ask, stats.finished)

    def _follow(self, ask: Ask, ended: float) -> None:
        self.ended += 1
        self.open -= 1
        for later in self._traffic.after(ask, ended):
            self._count(later)
            moment = max(ended, later.at) + self._setup.settings.lag
            heapq.heappush(self._later, (moment, next(self._order), later))

    def _change(self, number: int, back: bool) -> None:
        replica = self.replicas[number]
        if back:
            replica.start()
            self._release_parked()
        elif replica.up:
            started = {ask.number for ask in replica.open if replica.started(ask)}
            lost = replica.stop()
            self._rule.forget(number)
            self._steps = [each for each in self._steps if each[1] != number]
            heapq.heapify(self._steps)
            for ask in lost:
                if ask.number in started:
                    self.counts.failed += 1
                    self._follow(ask, self.clock.now)
                else:
                    self._arrive(ask)

    def _release_parked(self) -> None:
        waiting, self._parked = self._parked, []
        for ask in waiting:
            self._arrive(ask)

    def _look(self, scale: Autoscale) -> None:
        """Let replicas come and go with the load. If nothing changes, nothing will until the next event."""
        now, changes = self.clock.now, False
        for number in [number for number, at in self._coming.items() if at <= now]:
            changes = True
            del self._coming[number]
            self.replicas[number].start()
        up = [number for number, each in enumerate(self.replicas) if each.up]
        wanted = min(self._plan.replicas, max(scale.least, -(-self.open // scale.requests)))
        spare = [
            n for n, each in enumerate(self.replicas) if not each.up and n not in self._coming and each.due is None
        ]
        for number in spare[: max(0, wanted - len(up) - len(self._coming))]:
            changes = True
            self._coming[number] = now + scale.start
        for number in up[max(wanted, scale.least) :][::-1]:
            if not self.replicas[number].open:
                changes = True
                self.replicas[number].leave()
                self._rule.forget(number)
        if self._parked and any(each.up for each in self.replicas):
            self._release_parked()
        comes = min(self._coming.values(), default=math.inf)
        later = AUTOSCALE_EVERY * math.ceil(comes / AUTOSCALE_EVERY) if comes < math.inf else comes
        self._next_look = AUTOSCALE_EVERY * (now // AUTOSCALE_EVERY + 1)
        if not changes:
            self._next_look = max(self._next_look, later)

    # ---- figures ----------------------------------------------------------------------------------------------

    def _figures(self) -> FleetFigures:
        c = self.counts
        for replica in self.replicas:
            replica.leave()
        duration = c.last

        def rate(number: float) -> float:
            return number / duration if duration else 0.0

        def total(name: str) -> float:
            return sum(getattr(each, name) for each in self.replicas)

        seconds, held = total("seconds"), total("held")
        price, output = self._plan.price, c.output_tokens
        return FleetFigures(
            requests=self.requests,
            completed=c.completed,
            failed=c.failed,
            refused=c.refused,
            duration=duration,
            request_rate=rate(c.completed),
            output_rate=rate(output),
            total_rate=rate(output + c.prompt_tokens),
            goodput=rate(c.good) if c.bounds != Bounds() else None,
            ttft=Spread.of(c.ttft),
            itl=Spread.counted(c.gaps),
            tpot=Spread.of(c.tpot),
            e2e=Spread.of(c.e2e),
            hit_rate=total("hit_tokens") / max(1, total("prompt_tokens")),
            host_hit_rate=total("host_tokens") / max(1, total("prompt_tokens")),
            host_loaded_bytes=int(total("loaded_bytes")),
            host_saved_bytes=int(total("saved_bytes")),
            ideal_hit_rate=c.seen_tokens / max(1, c.prompt_tokens),
            preemptions=int(total("preemptions")),
            kv_waste=1 - total("filled") / held if held else 0.0,
            steps=int(total("steps")),
            replica_seconds=seconds,
            busy=total("busy") / seconds if seconds else 0.0,
            cost_per_million=price * seconds / 3600 / output * 1e6 if price is not None and output else None,
            tenants={name: Spread.of(times) for name, times in sorted(c.by_tenant.items())},
        )


def _changes(failures: Sequence[ReplicaFailure]) -> Iterator[tuple[float, int, bool]]:
    for each in failures:
        yield each.at, each.replica, False
        yield each.at + each.away, each.replica, True
