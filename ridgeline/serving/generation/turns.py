"""The turns of several models on the same devices.

Requests go to the engine of their model at all times, and wait there while it sleeps. `Turns` looks for models with
waiting requests, puts the model that is awake to sleep, and wakes up the one that has waited longest:

    a ── works ──┐ sleeps · · · · · · · · ┌── works ──
    b · · waits  └ wakes ── works ── idle ┘

A model keeps the devices while no other model waits, and for `turn` seconds if one does. Its running requests then
pause, and continue in its next turn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from ridgeline.core.plan.sleep import KINDS
from ridgeline.serving.errors import RequestFailed
from ridgeline.serving.generation.replicas import Replicas
from ridgeline.transport.messages import Order, Sleep, Wake

logger = logging.getLogger(__name__)

LOOK = 0.02  # seconds between looks
PATIENCE = 900.0  # seconds for an engine to obey: it may load its model
AGAIN = 1.0  # seconds after which a model that could not have its turn gets another chance


class NotObeyed(Exception):
    """Raised when an engine did not do what it was ordered to."""


class Turns:
    """The turns of `models`, by their names.

    `free` tells if no engine has the devices, and is asked only while none is known to. `starts` tells if an engine of
    the model with this number was started again, and waits for the devices to load its model.
    """

    def __init__(
        self,
        models: Sequence[Replicas],
        names: Sequence[str],
        turn: float,
        free: Callable[[], bool],
        starts: Callable[[int], bool],
    ) -> None:
        self._models, self._names, self._turn, self._free, self._starts = models, names, turn, free, starts
        self._awake: dict[int, float] = {}  # since when
        self._waiting: dict[int, float] = {}  # since when
        self._level = [1] * len(models)  # at which each can sleep

    async def run(self) -> None:
        """Let the models have their turns, until cancelled."""
        while True:
            await asyncio.sleep(LOOK)
            now = time.monotonic()
            if (chosen := self.choose(now)) is None:
                continue
            try:
                await self._begin(chosen)
            except (NotObeyed, RequestFailed) as error:
                logger.warning("%s could not have its turn: %s", self._names[chosen], error)
                self._waiting.pop(chosen, None)  # others come first
                await asyncio.sleep(AGAIN)

    def choose(self, now: float) -> int | None:
        """Return the model that should run at this time, or None while nothing should change."""
        for place, model in enumerate(self._models):
            _note(self._awake, place, model.facts is not None and model.stats is not None and not model.asleep, now)
            waits = any(engine.asleep and engine.busy for engine in model.engines)
            _note(self._waiting, place, self._starts(place) if model.facts is None else waits, now)
        if not self._waiting:
            return None
        if any(busy(self._models[place]) and now - since < self._turn for place, since in self._awake.items()):
            return None
        if not self._awake and not self._free():
            return None  # another model loads
        return min(self._waiting, key=lambda place: self._waiting[place])

    async def _begin(self, chosen: int) -> None:
        began = time.monotonic()
        for place in self._awake.keys() - {chosen}:  # of which some engines may be awake
            await self._let_sleep(place)
        model, name = self._models[chosen], self._names[chosen]
        if model.facts is not None:
            await self._order(chosen, Wake(kinds=list(KINDS)))
        else:
            while model.facts is None and (self._starts(chosen) or not self._free()):
                await asyncio.sleep(LOOK)  # it takes the devices by itself
        logger.info("%s has the devices, after %.2f s", name, time.monotonic() - began)

    async def _let_sleep(self, place: int) -> None:
        """Let a model sleep at level 1 if it can, and otherwise at level 2, after it has ended what it had begun."""
        if self._level[place] == 1:
            try:
                return await self._order(place, Sleep(mode="keep", level=1))
            except NotObeyed as error:
                logger.info("%s sleeps at level 2, because: %s", self._names[place], error)
                self._level[place] = 2
        await self._order(place, Sleep(mode="wait", level=2))

    async def _order(self, place: int, order: Order) -> None:
        standing = await self._models[place].order(order, PATIENCE)
        if standing.error:
            raise NotObeyed(standing.error)


def busy(model: Replicas) -> bool:
    return any(engine.busy for engine in model.engines)


def _note(times: dict[int, float], place: int, now_true: bool, now: float) -> None:
    if now_true:
        times.setdefault(place, now)
    else:
        times.pop(place, None)
