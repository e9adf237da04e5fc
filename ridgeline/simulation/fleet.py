"""The events of a fleet in order of time: requests come, steps end, replicas stop and start."""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from ridgeline.core.collector import no_garbage_collection
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.request import RequestStats
from ridgeline.engine.cache.prefix import root_hash
from ridgeline.routing import RoutingRule, rule_of
from ridgeline.simulation.clock import VirtualClock
from ridgeline.simulation.figures import Bounds, Counts, FleetFigures, Spread
from ridgeline.simulation.handover import block_bytes, check_layout
from ridgeline.simulation.replica import Replica
from ridgeline.simulation.setup import Setup
from ridgeline.simulation.traffic import Ask, Piece, Prompts, Traffic, check

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
    """A fleet. replicas: the most that there are. price: of one replica for an hour.

    prefill: so many of the replicas, the first ones, run prompts alone; the others then write the answers. 0: each does
        both. handover_rate: bytes a second in which one of the first sends keys and values to the others.
    """

    replicas: int = 1
    prefill: int = 0
    handover_rate: float = 50e9
    routing: str = "prefix"
    failures: Sequence[ReplicaFailure] = ()
    autoscale: Autoscale | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= MOST_REPLICAS:
            raise InvalidConfig(f"replicas must be from 1 to {MOST_REPLICAS}, got {self.replicas}.")
        if self.price is not None and not 0 < self.price <= 1e9:
            raise InvalidConfig(f"the price for an hour must be above 0 and at most 1e9, got {self.price!r}.")
        if self.prefill and not 1 <= self.prefill < self.replicas:
            raise InvalidConfig(f"{self.prefill} of {self.replicas} replicas cannot run prompts alone; leave some.")
        if self.prefill and self.autoscale is not None:
            raise InvalidConfig("split pools do not grow and shrink with the load; leave autoscaling out.")
        if not 0 < self.handover_rate < math.inf:
            raise InvalidConfig(f"the rate of handovers must be above 0 bytes a second, got {self.handover_rate!r}.")
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
        self._rule, self._rule_of_answers = rule_of(plan.routing), rule_of(plan.routing)
        if plan.prefill:
            check_layout(setup.layout)
            if not setup.settings.prefix_caching:
                raise InvalidConfig("blocks are handed over by their prefixes; leave prefix caching on.")
        names = [str(g.spec.format) for g in setup.layout.groups if hasattr(g.spec, "format")]
        self._prompts = Prompts(setup.layout.block_size, root_hash("", *sorted({*names} - {"None"})))
        slow = self.counts.bounds.itl
        shared = setup.disk(self.clock) if setup.settings.kv_disk_shared else None
        self.replicas = [
            Replica(
                *(setup, self.clock, self._prompts, self.counts.gaps, slow),
                partial(self._prefilled, number) if number < plan.prefill else self._ended,
                shared or setup.disk(self.clock),
            )
            for number in range(plan.replicas)
        ]
        self._whole: dict[int, Ask] = {}  # requests whose prompts run apart, by their numbers
        self._handovers: list[tuple[float, int, Ask, int]] = []  # with the replica that will answer
        self._sends_until = [0.0] * plan.prefill
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
        """Run until all requests have ended. Raise InvalidConfig for one that cannot run.

        Requests leave no cycles of objects behind, so the garbage collector would only look at the caches again and
        again, for a tenth of the time."""
        with no_garbage_collection():
            return self._run()

    def _run(self) -> FleetFigures:
        coming = self._arrivals()
        ask = next(coming, None)
        while ask is not None or self.open or self._later or any(each.steps_now for each in self.replicas):
            moments = [self._steps[0][0]] if self._steps else []
            if ask is not None:
                moments.append(ask.at + self._setup.settings.lag)
            if self._later:
                moments.append(self._later[0][0])
            if not moments and not self._handovers and not self._parked:
                break
            if self._handovers:
                moments.append(self._handovers[0][0])
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
            elif self._handovers and self._handovers[0][0] <= now:
                self._answer(*heapq.heappop(self._handovers)[2:])
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
        if self._plan.prefill:
            self._whole[ask.number] = ask
            ask = replace(ask, answer=Piece(ask.answer.content, 1), limit=1)
        chosen = self._chosen(ask, self._rule, range(self._plan.prefill or len(self.replicas)))
        if chosen is None:
            self._park(ask)
        else:
            self._give(ask, chosen)

    def _park(self, ask: Ask) -> None:
        self._parked.append(self._whole.pop(ask.number, ask))

    def _chosen(self, ask: Ask, rule: RoutingRule, pool: range) -> int | None:
        """Return which of these replicas gets a request; None if none is up."""
        loads = {number: self.replicas[number].load for number in pool if self.replicas[number].up}
        if len(loads) < 2:
            return next(iter(loads), None)
        session = str(ask.session) if ask.session >= 0 else ""
        return rule.choose(self._prompts.tokens(ask.prompt), ask.tenant, loads, session=session)

    def _give(self, ask: Ask, chosen: int) -> None:
        replica = self.replicas[chosen]
        before = replica.due
        if not replica.add(ask, self._prompts.tokens(ask.prompt)):
            self.counts.refused += 1
            self._follow(self._whole.pop(ask.number, ask), self.clock.now)
        elif replica.due != before:
            self._plan_step(chosen)

    # ---- split pools ------------------------------------------------------------------------------------------

    def _prefilled(self, number: int, ask: Ask, stats: RequestStats, over: int) -> None:
        """A replica has run a prompt: send what another one lacks of it."""
        ask = self._whole.pop(ask.number)
        if not stats.output_tokens:  # a policy ended it
            self._ended(ask, stats, over)
        else:
            self._hand_over(ask, number)

    def _hand_over(self, ask: Ask, sender: int) -> None:
        answers = range(self._plan.prefill, len(self.replicas))
        if (chosen := self._chosen(ask, self._rule_of_answers, answers)) is None:
            self._park(ask)
            return
        size = self.replicas[chosen].lacks(ask) * block_bytes(self._setup.layout)
        until = max(self._sends_until[sender], self.clock.now) + size / self._plan.handover_rate
        self._sends_until[sender] = until
        heapq.heappush(self._handovers, (until, next(self._order), ask, chosen))

    def _answer(self, ask: Ask, chosen: int) -> None:
        """A prompt's blocks have come to the replica that answers. If it is gone, the request begins anew."""
        if self.replicas[chosen].up:
            self.replicas[chosen].receive(ask)
            self._give(ask, chosen)
        else:
            self._arrive(ask)

    def _plan_step(self, number: int) -> None:
        due = self.replicas[number].due
        if due is not None:
            heapq.heappush(self._steps, (due, number))

    def _step(self, number: int) -> None:
        due = self.replicas[number].due
        if due is not None and due <= self.clock.now:  # else a request came that made a step before a read
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
            prompts = number < self._plan.prefill  # whose one token no client gets
            started = {ask.number for ask in replica.open if not prompts and replica.started(ask)}
            lost = [self._whole.pop(ask.number, ask) for ask in replica.stop()]
            gc.collect()  # an engine and its parts know each other
            (self._rule if prompts or not self._plan.prefill else self._rule_of_answers).forget(number)
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

        def of_prompts(name: str) -> float:  # what replicas that answer find was sent to them
            return sum(getattr(each, name) for each in self.replicas[: self._plan.prefill or None])

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
            hit_rate=of_prompts("hit_tokens") / max(1, of_prompts("prompt_tokens")),
            host_hit_rate=of_prompts("host_tokens") / max(1, of_prompts("prompt_tokens")),
            disk_hit_rate=of_prompts("disk_tokens") / max(1, of_prompts("prompt_tokens")),
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
