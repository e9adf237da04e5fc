"""One replica of a fleet: an engine, its device, and the requests that it has."""

from __future__ import annotations

from collections.abc import Callable

from ridgeline.core.errors import CannotPromise
from ridgeline.core.plan.request import Preemption, Request, RequestStats, SamplingParams
from ridgeline.routing import ServerLoad
from ridgeline.simulation.clock import VirtualClock
from ridgeline.simulation.setup import Setup
from ridgeline.simulation.tally import Tally
from ridgeline.simulation.traffic import Ask, Prompts

Ended = Callable[[Ask, RequestStats, int], None]
SAMPLED_STEPS = 16  # one of so many is looked at for the waste of the cache


class Replica:
    """ended: called with a request, its times, and how many gaps between its tokens were longer than `slow` seconds.
    up: it can take requests. since: when it began to."""

    def __init__(
        self, setup: Setup, clock: VirtualClock, prompts: Prompts, gaps: Tally, slow: float, ended: Ended
    ) -> None:
        self._setup, self._clock, self._prompts, self._gaps, self._slow = setup, clock, prompts, gaps, slow
        self._ended = ended
        self.up, self.since, self.seconds, self.busy, self.steps = True, clock.now, 0.0, 0.0, 0
        self.preemptions = 0
        self.prompt_tokens = self.hit_tokens = 0
        self.held = self.filled = 0  # tokens that blocks of running requests have room for, and those that are there
        self._tokens = 0
        self._begin()

    def _begin(self) -> None:
        self.engine, self.device = self._setup.start(self._clock, self._gaps, self._slow)
        self.engine.on_finish(self._finished)

    @property
    def load(self) -> ServerLoad:
        return ServerLoad(len(self.device.asks), self._tokens)

    @property
    def open(self) -> list[Ask]:
        """The requests that have not ended, in the order in which they came."""
        return list(self.device.asks.values())

    @property
    def due(self) -> float | None:
        """The moment at which the step under way ends; None if there is none."""
        return self.device.due

    def add(self, ask: Ask, prompt: tuple[int, ...]) -> bool:
        """Give it a request, whose prompt has these token ids. It looks at it when the step under way ends. Return
        False if its policy refuses the request."""
        limit = max(ask.limit, ask.answer.tokens)
        encodes = bool(self.engine.config.encodes)
        begun = (0,) if encodes else prompt  # the decoder's start
        request = Request(
            id=str(ask.number),
            prompt_token_ids=begun,
            params=SamplingParams(max_tokens=limit, temperature=0.0, ignore_eos=True),
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

    def step(self) -> None:
        """Take the result of the step that has ended, and make further plans."""
        self.engine.take()
        if self.device.steps % SAMPLED_STEPS == 0:
            slots = self.engine.scheduler.slots
            self.held += int(slots.capacity[slots.used].sum())
            self.filled += int(slots.kv_len[slots.used].sum())
        if self.engine.has_work:
            self.engine.fill()

    def stop(self) -> list[Ask]:
        """Lose all that it has. Return the open requests."""
        lost = self.open
        self.leave()
        self._tokens = 0
        return lost

    def leave(self) -> None:
        """Take what the engine counted, and count the time in which it was there."""
        scheduler, cache = self.engine.scheduler, self.engine.scheduler.cache
        self.preemptions += sum(scheduler.preemptions[reason] for reason in Preemption)
        self.prompt_tokens += cache.queried_tokens
        self.hit_tokens += cache.hit_tokens
        self.busy += self.device.busy
        self.steps += self.device.steps
        if self.up:
            self.seconds += self._clock.now - self.since
        self.up = False
        self._begin()

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
        self.device.forget(number)
        self._ended(ask, stats, over)
