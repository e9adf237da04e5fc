"""Several engines that act as one. Each has its own requests, scheduler and cache, and one rank of a group that divides
a mixture's experts. All of them plan first and then collect, so that their plans run in the same rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ridgeline.core.errors import DeviceLost, InvalidConfig
from ridgeline.core.plan.cache_figures import CacheFigures
from ridgeline.core.plan.request import Request, RequestStats, StepEvents
from ridgeline.core.plan.routing import Router
from ridgeline.core.plan.sleep import KINDS, Kind
from ridgeline.core.plan.step import StepPlan
from ridgeline.core.plan.worker import Sleeps, Worker
from ridgeline.engine.engine import Engine, lost_device
from ridgeline.engine.figures import Figures
from ridgeline.kernels.base.cost import Headroom


class Engines:
    """One engine made of several. A request runs where its beginning is cached, unless there is too much to do there
    (`core.plan.routing`).

    worker: all their workers, of which each engine has one part.
    """

    def __init__(self, engines: Sequence[Engine], worker: Worker) -> None:
        first = engines[0]
        self.engines, self.config, self.layout = engines, first.config, first.layout
        self.headroom = Headroom()
        self.last_plan: StepPlan | None = None
        self.scheduler = Schedulers(engines)
        self._worker, self._router = worker, Router(len(engines))
        self._lost: str | None = None  # why nothing runs any more
        self._places: dict[str, tuple[Engine, int]] = {}  # of open requests: their engine, and their tokens at most
        self._load: Counter[Engine] = Counter()  # tokens of open requests
        self.on_finish(lambda request, stats: None)

    def on_finish(self, listener: Callable[[Request, RequestStats], None]) -> None:
        def finished(request: Request, stats: RequestStats) -> None:
            if (place := self._places.pop(request.id, None)) is not None:  # rehearsals have none
                engine, tokens = place
                self._load[engine] -= tokens
            listener(request, stats)

        for engine in self.engines:
            engine.on_finish(finished)

    def on_begin(self, listener: Callable[[list[Request]], None]) -> None:
        for engine in self.engines:
            engine.on_begin(listener)

    @property
    def has_work(self) -> bool:
        return self._lost is None and any(engine.has_work for engine in self.engines)

    def add(self, request: Request, *, checked: bool = False) -> None:
        self._check_device()
        if not checked:
            self.check(request)
        loads = {number: self._load[engine] for number, engine in enumerate(self.engines)}
        engine = self.engines[self._router.choose(request.prompt_token_ids, request.cache_salt, loads)]
        engine.add(request, checked=True)
        self._places[request.id] = engine, request.max_total_tokens
        self._load[engine] += request.max_total_tokens

    def pause(self) -> None:
        for engine in self.engines:
            engine.pause()

    def resume(self) -> None:
        for engine in self.engines:
            engine.resume()

    def check(self, request: Request) -> None:
        self.engines[0].check(request)

    def abort(self, request_id: str, at_token: int | None = None) -> bool:
        place = self._places.get(request_id)
        return place is not None and place[0].abort(request_id, at_token)

    def step(self) -> StepEvents:
        """Keep all workers supplied, then wait for the oldest plan of each."""
        self._check_device()
        events = StepEvents()
        try:
            for engine in self.engines:
                engine.fill()
            for engine in self.engines:
                own = engine.take()
                events.ids += own.ids
                events.token_ids += own.token_ids
                events.events += own.events
        except DeviceLost:
            self._lost = next(engine._lost for engine in self.engines if engine._lost is not None)
            raise
        spent = [engine.headroom for engine in self.engines]
        self.headroom = Headroom(sum(each.elapsed for each in spent), sum(each.limit for each in spent))
        self.last_plan = _largest([engine.last_plan for engine in self.engines])
        return events

    @property
    def last_tokens(self) -> int:
        """The tokens that all of them ran in the last step."""
        return sum(engine.last_tokens for engine in self.engines)

    def rehearse(self) -> None:
        for engine in self.engines:
            engine.rehearse()

    def rest(self) -> bool:
        self._check_device()
        return any(engine.rest() for engine in self.engines)

    @property
    def asleep(self) -> bool:
        return False

    def sleeper(self) -> Sleeps:
        raise InvalidConfig("several ranks cannot sleep at level 1; ask for level 2.")

    def sleep(self) -> None:
        self.sleeper()

    def wake(self, kinds: Sequence[Kind] = KINDS) -> None:
        self.sleeper()

    def shutdown(self) -> None:
        for engine in self.engines:
            engine.tell_no_more()
            engine.leave_disk()
        self._worker.shutdown()

    def _check_device(self) -> None:
        if self._lost is not None:
            raise lost_device(self._lost)

    def census(self) -> list[CacheFigures]:
        return [figures for engine in self.engines for figures in engine.census()]

    def forget_prefixes(self) -> None:
        for engine in self.engines:
            engine.forget_prefixes()

    def renew_weights(self, version: str) -> None:
        for engine in self.engines:
            engine.renew_weights(version)


class Schedulers:
    """A combined view of the schedulers of several engines. It schedules nothing itself."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._each = [engine.scheduler for engine in engines]

    @property
    def num_running(self) -> int:
        return sum(each.num_running for each in self._each)

    @property
    def num_waiting(self) -> int:
        return sum(each.num_waiting for each in self._each)

    @property
    def has_work(self) -> bool:
        return any(each.has_work for each in self._each)

    def forget_adapter(self, number: int) -> bool:
        return all(each.forget_adapter(number) for each in self._each)

    def untouched(self) -> list[Request]:
        return [request for each in self._each for request in each.untouched()]

    def figures(self) -> Figures:
        first, *others = (each.figures() for each in self._each)
        return sum(others, first)

    def stats_of(self, request_id: str) -> RequestStats:
        [found] = [each for each in self._each if each.knows(request_id)]
        return found.stats_of(request_id)


def _largest(plans: Sequence[StepPlan | None]) -> StepPlan | None:
    return max((plan for plan in plans if plan is not None), key=lambda plan: plan.num_tokens, default=None)
