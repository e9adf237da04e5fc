"""One replica of a fleet: an engine, its device, and the requests that it has."""

from __future__ import annotations

from collections.abc import Callable

from ridgeline.core.errors import CannotPromise
from ridgeline.core.plan.request import Preemption, Request, RequestStats
from ridgeline.engine.engine import Engine
from ridgeline.routing import ServerLoad
from ridgeline.simulation.clock import VirtualClock
from ridgeline.simulation.device import Device
from ridgeline.simulation.disk import SimulatedDisk, TimedResult
from ridgeline.simulation.handover import lacking, receive
from ridgeline.simulation.setup import Setup
from ridgeline.simulation.tally import Tally
from ridgeline.simulation.traffic import Ask, Prompts

Ended = Callable[[Ask, RequestStats, int], None]
SAMPLED_STEPS = 16  # one of so many is looked at for the waste of the cache


class Replica:
    """ended: called with a request, its times, and how many gaps between its tokens were longer than `slow` seconds.
    disk: the store below its host's memory, if there is one. up: it can take requests. since: when it began to."""

    def __init__(
        self,
        setup: Setup,
        clock: VirtualClock,
        prompts: Prompts,
        gaps: Tally,
        slow: float,
        ended: Ended,
        disk: SimulatedDisk | None = None,
    ) -> None:
        self._setup, self._clock, self._prompts, self._gaps, self._slow = setup, clock, prompts, gaps, slow
        self._ended = ended
        self.up, self.since, self.seconds, self.busy, self.steps = True, clock.now, 0.0, 0.0, 0
        self.preemptions = 0
        self.prompt_tokens = self.hit_tokens = self.host_tokens = 0
        self.loaded_bytes = self.saved_bytes = 0
        self.held = self.filled = 0  # tokens that blocks of running requests have room for, and those that are there
        self._tokens, self.disk_tokens = 0, 0
        self._disk = disk
        self._made: tuple[Engine, Device] | None = None  # with the first request: few of many replicas may get one

    def _begin(self) -> tuple[Engine, Device]:
        """Return the engine and its device, which begin with the first request."""
        if self._made is None:
            self._made = self._setup.start(self._clock, self._gaps, self._slow, self._disk)
            self._made[0].on_finish(self._finished)
        return self._made

    @property
    def engine(self) -> Engine:
        return self._begin()[0]

    @property
    def device(self) -> Device:
        return self._begin()[1]

    @property
    def load(self) -> ServerLoad:
        return ServerLoad(0 if self._made is None else len(self._made[1].asks), self._tokens)

    @property
    def open(self) -> list[Ask]:
        """The requests that have not ended, in the order in which they came."""
        return [] if self._made is None else list(self._made[1].asks.values())

    @property
    def due(self) -> float | None:
        """The moment at which the step under way ends, or else at which the disk has read what a request waits for, or
        has written what there is no request to wait for. None if there is nothing of these."""
        if self._made is None:
            return None
        step = self._made[1].due
        return step if step is not None or self._disk is None else self._disk_due(self._made[0])

    @property
    def steps_now(self) -> bool:
        """Return True if a step is under way."""
        return self._made is not None and self._made[1].due is not None

    def _disk_due(self, engine: Engine) -> float | None:
        tier, found = engine.scheduler.cache.tier, list[float]()
        assert tier is not None
        assert tier.disk is not None
        for fetch in tier.disk.waiting:
            assert isinstance(fetch.reads[-1].done, TimedResult)
            found.append(min(fetch.until, fetch.reads[-1].done.at))
        if not engine.has_work and isinstance(written := tier.disk.next_write, TimedResult):
            found.append(max(written.at, self._clock.now))
        return min(found, default=None)

    def add(self, ask: Ask, prompt: tuple[int, ...]) -> bool:
        """Give it a request, whose prompt has these token ids. It looks at it when the step under way ends. Return
        False if its policy refuses the request."""
        limit = max(ask.limit, ask.answer.tokens)
        encodes = bool(self.engine.config.encodes)
        begun = (0,) if encodes else prompt  # the decoder's start
        request = Request(
            id=str(ask.number),
            prompt_token_ids=begun,
            params=self._setup.params(limit),
            seed=ask.number,
            max_total_tokens=len(begun) + limit,
            arrival=self._clock.now,
            owner=ask.tenant,
            priority=ask.priority,
            block_hashes=() if encodes else self._prompts.hashes(ask.prompt),
            encoder_ids=prompt if encodes else (),
        )
        try:
            self.engine.add(request, checked=True)
        except CannotPromise:
            return False
        self.device.asks[ask.number] = ask
        self._tokens += request.max_total_tokens
        if self.device.due is None:
            self.engine.fill()
        return True

    def lacks(self, ask: Ask) -> int:
        """Return the number of the prompt's whole blocks that are not in its cache."""
        return len(lacking(self.engine.scheduler.cache, self._prompts.hashes(ask.prompt)))

    def receive(self, ask: Ask) -> None:
        """Take the prompt's whole blocks from another replica, where there is room for them."""
        hashes = self._prompts.hashes(ask.prompt)
        receive(self.engine.scheduler.cache, self._prompts.root, hashes, ("handed over", ask.number))

    def step(self) -> None:
        """Take the result of the step that has ended, and make further plans."""
        engine, device = self._begin()
        if device.due is not None:
            engine.take()
        if device.steps % SAMPLED_STEPS == 0:
            slots = engine.scheduler.slots
            self.held += int(slots.capacity[slots.used].sum())
            self.filled += int(slots.kv_len[slots.used].sum())
        if engine.has_work:
            engine.fill()
        elif self._disk is not None:
            self._write_rest(engine)

    def _write_rest(self, engine: Engine) -> None:
        """Let what no plan saves any more go to the host's memory, and from there to the disk."""
        tier = engine.scheduler.cache.tier
        assert tier is not None
        assert tier.disk is not None
        engine.rest()
        while tier.disk.has_ripe and engine.rest():
            pass

    def stop(self) -> list[Ask]:
        """Lose all that it has. Return the open requests."""
        lost = self.open
        self.leave()
        self._tokens = 0
        return lost

    def leave(self) -> None:
        """Take what the engine counted, and count the time in which it was there."""
        if self._made is not None:
            engine, device = self._made
            self.preemptions += sum(engine.scheduler.preemptions[reason] for reason in Preemption)
            self.prompt_tokens += engine.scheduler.cache.queried_tokens
            self.hit_tokens += engine.scheduler.cache.hit_tokens
            if (tier := engine.scheduler.cache.tier) is not None:
                self.host_tokens += tier.counts.hit
                self.loaded_bytes += tier.counts.loaded
                self.saved_bytes += tier.counts.saved
                self.disk_tokens += tier.disk.counts.hit if tier.disk is not None else 0
            self.busy += device.busy
            self.steps += device.steps
        if self.up:
            self.seconds += self._clock.now - self.since
        self.up, self._made = False, None

    def start(self) -> None:
        """Take requests from now on."""
        self.up, self.since = True, self._clock.now

    def started(self, ask: Ask) -> bool:
        """Return True if the client has got a token of an open request."""
        return self.engine.scheduler.stats_of(str(ask.number)).first_token is not None

    def _finished(self, request: Request, stats: RequestStats) -> None:
        number = request.seed
        ask, over = self.device.asks[number], self.device.over(number)
        self._tokens -= request.max_total_tokens
        self.engine.scheduler.cache.pool.returned(("handed over", number))
        self.device.forget(number)
        self._ended(ask, stats, over)
