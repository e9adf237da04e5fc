"""The engines of one server, as an API server sees them: one, or several that run the same model.

Each request goes to one of them. All other messages go to every engine, and their answers are combined.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from ridgeline.core.plan.cache_figures import CacheFigures
from ridgeline.core.plan.request import Request
from ridgeline.core.plan.routing import Router
from ridgeline.serving.errors import RequestFailed, Unavailable
from ridgeline.serving.generation.engine_client import RETRY_AFTER, EngineClient
from ridgeline.serving.generation.sums import summed
from ridgeline.serving.generation.ticket import RequestTicket
from ridgeline.transport.messages import (
    AdapterAnswer,
    AdapterOrder,
    EngineFacts,
    Grammar,
    Life,
    LoadAdapter,
    MeetTrainer,
    Order,
    ServedAdapter,
    Standing,
    Stats,
    Submit,
    UnloadAdapter,
    WeightOrder,
)


class Replicas:
    """Engines behind the interface of a single one. With a single one, everything goes straight to it."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self.engines = tuple(engines)
        self.name = engines[0].name
        self.first = len(engines) > 1  # the API server's first life: it has seen the engines start
        self._begun = False  # every engine has answered once
        self._router = Router(len(engines))
        self._lives = [0] * len(engines)  # of the engines that the router knows
        for engine in engines if len(engines) > 1 else ():
            engine.heir = partial(self._heir, engine)

    @property
    def facts(self) -> EngineFacts | None:
        """The facts that hold for every engine that answers, or None while none does."""
        return _common([engine.facts for engine in self.engines])

    @property
    def known(self) -> EngineFacts | None:
        """The newest facts, even of engines that do not answer now."""
        return _common([engine.known for engine in self.engines])

    @property
    def stats(self) -> Stats | None:
        """The newest figures of all engines together."""
        return self._summed([engine.stats for engine in self.engines])

    @property
    def num_open(self) -> int:
        return sum(engine.num_open for engine in self.engines)

    @property
    def lives(self) -> int:
        return sum(engine.lives for engine in self.engines)

    @property
    def starting(self) -> str | None:
        """The reason why requests should wait a moment: the server has just begun, and one of several engines has not
        answered yet. Requests that came now would all lie on the others."""
        if self._begun or not self.first:
            return None
        late = [f"engine {index} is starting" for index, engine in enumerate(self.engines) if not engine.lives]
        self._begun = not late
        return "; ".join(late) or None

    def illnesses(self) -> list[str]:
        """Return the fault of each engine that requests should not go to."""
        ill = {index: engine.illness for index, engine in enumerate(self.engines)}
        if len(self.engines) == 1:
            return [reason for reason in ill.values() if reason is not None]
        return [f"engine {index}: {reason}" for index, reason in ill.items() if reason is not None]

    @property
    def paused(self) -> bool:
        """True if no engine that answers begins steps, because they were paused by an order."""
        up = [engine for engine in self.engines if engine.facts is not None]
        return bool(up) and all(engine.paused for engine in up)

    @property
    def asleep(self) -> int:
        """The level at which all engines that answer sleep; 0 if one of them is awake."""
        return min((engine.asleep for engine in self.engines if engine.facts is not None), default=0)

    def give_up(self, process_id: int, why: str) -> None:
        """Take the engine with this process for dead, as `EngineClient.give_up`."""
        for engine in self.engines:
            engine.give_up(process_id, why)

    async def order(self, message: Order, timeout: float) -> Standing:
        """Order all engines that answer, as `EngineClient.order`. Return the standing of the first that did not obey,
        or of the first of all."""
        up = [engine for engine in self.engines if engine.facts is not None]
        if isinstance(message, WeightOrder):
            found = await self._order_each(message, timeout)
        else:
            found = await asyncio.gather(*(engine.order(message, timeout) for engine in up or self.engines))
        return next((each for each in found if each.error), found[0])

    async def _order_each(self, message: WeightOrder, timeout: float) -> list[Standing]:
        """Give all engines an order about weights, none of which may be missing. Each has ranks of its own in the
        trainer's group, one engine's behind the other's."""
        if any(engine.facts is None for engine in self.engines):
            raise Unavailable("an engine is not running; try again soon.", retry_after=RETRY_AFTER)
        orders, rank = list[WeightOrder](), 0
        for engine in self.engines:
            assert engine.facts is not None
            orders.append(replace(message, rank=message.rank + rank) if isinstance(message, MeetTrainer) else message)
            rank += engine.facts.ranks
        each = zip(self.engines, orders, strict=True)
        return list(await asyncio.gather(*(engine.order(own, timeout) for engine, own in each)))

    async def change_adapters(self, message: AdapterOrder, timeout: float) -> AdapterAnswer:
        """Load or unload an adapter in every engine, one engine after the other: so the first one orders what several
        API servers want at once. One that could not be loaded everywhere is unloaded where it was. Return the first
        error, or the first engine's answer. Raise Unavailable while an engine is not there."""
        if any(engine.facts is None for engine in self.engines):
            raise Unavailable("an engine is not running; try again soon.", retry_after=RETRY_AFTER)
        told: list[AdapterAnswer] = []
        try:
            for engine in self.engines:
                told.append(await engine.change_adapters(message, timeout))
                if told[-1].error and isinstance(message, LoadAdapter):
                    break
        finally:
            if isinstance(message, LoadAdapter) and (len(told) < len(self.engines) or told[-1].error):
                undo = UnloadAdapter(id=message.id, name=message.name, number=message.number)
                up = [engine for engine in self.engines[: len(told)] if engine.facts is not None]
                await asyncio.gather(*(engine.change_adapters(undo, timeout) for engine in up), return_exceptions=True)
        if isinstance(message, UnloadAdapter) and any(not each.error for each in told):
            return next(each for each in told if not each.error)
        return next((each for each in told if each.error), told[0])

    async def wait_until_up(self) -> EngineFacts:
        """Wait until an engine answers."""
        waits = [asyncio.create_task(engine.wait_until_up()) for engine in self.engines]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for wait in waits:
                wait.cancel()

    async def run(self) -> None:
        """Listen to all engines until cancelled."""
        await asyncio.gather(*(engine.run() for engine in self.engines))

    def submit(
        self, request: Request, grammar: Grammar | None, *, name: str = "", index: int = 0
    ) -> Coroutine[Any, Any, RequestTicket]:
        """Send a request to an engine and return its ticket. Raise Unavailable if no engine is there to run it."""
        engines = self.engines
        engine = engines[0] if len(engines) == 1 else self._route(request)
        return engine.submit(request, grammar, name=name, index=index)

    def cancel(self, tickets: Iterable[RequestTicket], at_token: int | None = None) -> None:
        """End the completions that have not ended, as `EngineClient.cancel`."""
        tickets = list(tickets)
        for engine in self.engines:
            engine.cancel(tickets, at_token)

    def end_all(self, failure: RequestFailed) -> None:
        for engine in self.engines:
            engine.end_all(failure)

    async def ask(self, timeout: float = 1.0) -> Stats | None:
        """Return the figures of this moment, and the newest known ones of engines that do not answer in time."""
        return self._summed(await self.ask_each(timeout))

    async def ask_each(self, timeout: float = 1.0) -> list[Stats | None]:
        """Return each engine's figures, as `ask`."""
        return list(await asyncio.gather(*(engine.ask(timeout) for engine in self.engines)))

    async def forget(self) -> None:
        """Let no later request find anything in the prefix caches, as `EngineClient.forget`."""
        up = [engine for engine in self.engines if engine.facts is not None]  # the others have nothing
        await asyncio.gather(*(engine.forget() for engine in up or self.engines))

    async def census(self) -> list[CacheFigures]:
        """Return the figures of the caches of all engines that run, as `EngineClient.census`."""
        up = [engine for engine in self.engines if engine.facts is not None]
        told = await asyncio.gather(*(engine.census() for engine in up or self.engines))
        return [cache for caches in told for cache in caches]

    async def look(self, name: str | None = None, limit: int = 1, timeout: float = 1.0) -> list[Life]:
        """Return the course in time of the request with this name, or of the newest requests if no name is given.

        Raise Unavailable if no engine answers in time.
        """
        asked = [engine.look(name, limit, timeout) for engine in self.engines]
        told = await asyncio.gather(*asked, return_exceptions=True)
        lives = [answer for answer in told if isinstance(answer, list)]
        if not lives:
            raise next(answer for answer in told if isinstance(answer, BaseException))
        return lives[0] if len(self.engines) == 1 else _newest([life for some in lives for life in some], limit)

    # ---- inside -----------------------------------------------------------------------------------------------

    def _heir(self, dead: EngineClient, ticket: RequestTicket) -> EngineClient:
        """Return the engine for a request whose own has died: its successor while there is no other, and for one that
        may be what ended it."""
        if ticket.submit is None or ticket.suspect or all(engine.facts is None for engine in self.engines):
            return dead
        return self._route(ticket.submit)

    def _route(self, request: Request | Submit) -> EngineClient:
        """Return the engine for a request. Raise Unavailable if there is none."""
        up = {index: engine for index, engine in enumerate(self.engines) if engine.facts is not None}
        if not up:
            raise Unavailable("no engine is running yet; try again soon.", retry_after=RETRY_AFTER)
        for index, engine in up.items():
            if self._lives[index] != engine.lives:
                self._lives[index] = engine.lives
                self._router.forget(index, _room(engine))
        well = {index: engine for index, engine in up.items() if engine.illness is None}
        loads = {index: engine.load for index, engine in (well or up).items()}
        return self.engines[self._router.choose(request.prompt_token_ids, request.cache_salt, loads)]

    def _summed(self, figures: Sequence[Stats | None]) -> Stats | None:
        told = [(stats, engine.facts is not None) for stats, engine in zip(figures, self.engines, strict=True) if stats]
        return summed(told) if len(self.engines) > 1 and told else told[0][0] if told else None


def _room(engine: EngineClient) -> int:
    """Return the number of tokens that an engine's prefix cache holds."""
    facts = engine.facts
    return facts.num_pages * facts.block_size if facts is not None and facts.enable_prefix_caching else 0


def _shared_adapters(told: Sequence[EngineFacts]) -> list[ServedAdapter]:
    """Return the adapters that all engines have, under the same number and with the same content."""
    others = [{(each.number, each.key) for each in facts.adapters} for facts in told[1:]]
    return [each for each in told[0].adapters if all((each.number, each.key) in found for found in others)]


def _common(each: Sequence[EngineFacts | None]) -> EngineFacts | None:
    """Return the first engine's facts, with limits that all keep: a request must run wherever it goes."""
    told = [facts for facts in each if facts is not None]
    if len(told) < 2:
        return told[0] if told else None
    length, room = min(facts.max_model_len for facts in told), min(facts.cache_tokens for facts in told)
    adapters = _shared_adapters(told)
    versions = ",".join(dict.fromkeys(facts.weight_version for facts in told))
    if (told[0].max_model_len, told[0].cache_tokens, told[0].adapters) == (length, room, adapters):
        return told[0] if versions == told[0].weight_version else replace(told[0], weight_version=versions)
    return replace(told[0], max_model_len=length, cache_tokens=room, adapters=adapters, weight_version=versions)


def _newest(lives: list[Life], limit: int) -> list[Life]:
    """Return the completions of the newest requests, each request's together, in the engines' order."""
    created: dict[str, float] = {}
    for life in lives:
        created[life.name] = max(life.created, created.get(life.name, 0.0))
    names = sorted(created, key=lambda name: -created[name])[:limit]
    order = {name: place for place, name in enumerate(names)}
    return sorted((life for life in lives if life.name in order), key=lambda life: (order[life.name], life.index))
