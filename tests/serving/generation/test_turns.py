"""Whose turn it is on devices that several models share: engines that only remember what they were told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, cast

from ridgeline.serving.generation.replicas import Replicas
from ridgeline.serving.generation.turns import Turns
from ridgeline.serving.processes.turn import Turn
from ridgeline.transport.messages import Order, Standing, Wake
from tests.serving.conftest import PATIENCE


@dataclass
class Engine:
    asleep: int = 1
    busy: bool = False


@dataclass
class Model:
    """A model whose engines obey at once."""

    engines: list[Engine]
    facts: Any = "some"
    stats: Any = "some"
    told: list[Order] = field(default_factory=list)

    @property
    def asleep(self) -> int:
        return min(engine.asleep for engine in self.engines)

    async def order(self, order: Order, timeout: float) -> Standing:
        self.told.append(order)
        for engine in self.engines:
            engine.asleep = 0 if isinstance(order, Wake) else 1
        return Standing(paused=self.asleep > 0, asleep=self.asleep)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not true():
            await asyncio.sleep(0.01)


def turns(*models: Model) -> Turns:
    names = [str(place) for place in range(len(models))]
    given = cast("list[Replicas]", list(models))
    return Turns(given, names, 0.05, lambda: all(model.asleep for model in models), lambda place: False)


def test_a_model_of_which_one_engine_sleeps_has_a_turn() -> None:
    """One of the engines of the other model was started again, and took its device."""
    model, other = Model([Engine(asleep=0), Engine(asleep=1, busy=True)]), Model([Engine(asleep=1), Engine(asleep=0)])

    async def main() -> None:
        running = asyncio.create_task(turns(model, other).run())
        await until(lambda: not any(engine.asleep for engine in model.engines))
        running.cancel()
        assert all(engine.asleep for engine in other.engines)
        assert len(model.told) == 1, "what runs there goes on"

    asyncio.run(main())


def test_who_waits_tells_so_even_if_somebody_was_looking(tmp_path: Path) -> None:
    devices, waits = str(tmp_path / "devices"), str(tmp_path / "waits")
    holder, looks, looks_later = Turn(devices), Turn(waits), Turn(waits)
    assert holder.take(0)
    assert looks.take(0), "as `free` does for a moment"
    waiter = Thread(target=lambda: Turn(devices).wait(Turn(waits)))
    waiter.start()
    waiter.join(0.2)
    looks.give()

    async def told() -> None:
        await until(lambda: not looks_later.free)

    try:
        asyncio.run(told())
    finally:
        holder.give()
        waiter.join()
    assert looks_later.free
