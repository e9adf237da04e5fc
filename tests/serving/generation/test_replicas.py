"""Several engines as an API server sees them, where moments matter: the engines are scripts on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ridgeline.core.settings.serving import NamedModel, ServeConfig
from ridgeline.kernels.base.cost import Headroom
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import Unavailable
from ridgeline.serving.generation.sums import summed
from ridgeline.transport.messages import (
    Begun,
    Cancel,
    Distribution,
    Hello,
    Life,
    Look,
    Seen,
    Stats,
    StepFigures,
    Submit,
)
from ridgeline.weights.folder import EMBEDDED_MODEL
from tests.serving.conftest import MODEL, PATIENCE
from tests.serving.generation.test_engine_client import (
    STATS,
    ScriptedEngine,
    asked,
    check_empty,
    finish,
    in_time,
    ticket_of,
    until,
)


@asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[tuple[list[ScriptedEngine], ApiServer]]:
    """Two engines, and an API server that has greeted both."""
    paths = [folder / "first", folder / "second"]
    engines = [ScriptedEngine(path) for path in paths]
    api = ApiServer.build(ServeConfig(), NamedModel(str(EMBEDDED_MODEL), (MODEL,), tuple(map(str, paths))), "face")
    running = asyncio.create_task(api.client.run())
    try:
        for engine, client in zip(engines, api.client.engines, strict=True):
            await engine.heard(Hello)
            await asyncio.wait_for(client.wait_until_up(), PATIENCE)
        yield engines, api
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for engine in engines:
            engine.die()
            engine.socket.close()


def test_a_server_is_ready_once_all_engines_have_been_there(tmp_path: Path) -> None:
    """Requests that came while one still loads would all lie on the others. Later one may die, and it stays ready."""

    async def work() -> None:
        paths = [tmp_path / "first", tmp_path / "second"]
        model = NamedModel(str(EMBEDDED_MODEL), (MODEL,), tuple(map(str, paths)))
        api, again = (ApiServer.build(ServeConfig(), model, name) for name in ("face", "again"))
        again.client.first = False  # it took a dead API server's place
        engines = [ScriptedEngine(paths[0])]
        running = [asyncio.create_task(each.client.run()) for each in (api, again)]
        try:
            await until_heard(engines[0], lambda: all(each.client.facts is not None for each in (api, again)))
            assert (api.illness, api.unready) == (None, "engine 1 is starting")
            assert again.unready is None
            engines.append(ScriptedEngine(paths[1]))
            await until_heard(engines[1], lambda: api.unready is None)
            engines[1].die()
            await until(lambda: api.client.engines[1].facts is None)
            assert api.unready is None
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for engine in engines:
                engine.die()
                engine.socket.close()

    in_time(work())


async def until_heard(engine: ScriptedEngine, holds: Callable[[], bool]) -> None:
    """Let an engine answer greetings until that is true. None may come any more when it becomes true."""

    async def hear() -> None:
        while True:
            await engine.heard(Hello)

    hearing = asyncio.create_task(hear())
    try:
        await until(holds)
    finally:
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)


def test_an_engine_that_is_about_to_end_gets_nothing_more(tmp_path: Path) -> None:
    """Its connection is gone before its process is. What goes there meanwhile would be lost."""

    async def work() -> None:
        async with pair(tmp_path) as (engines, api):
            engines[0].socket.close()
            while len(api.client.illnesses()) < 1:
                await asyncio.sleep(0.005)
            assert api.healthy
            runs = [asyncio.create_task(finish(api, asked(max_tokens=1))) for _ in range(4)]
            for _ in runs:
                engines[1].finish((await engines[1].heard(Submit)).id, 7)
            assert all(run.result.outputs[0].token_ids == [7] for run in await asyncio.gather(*runs))
            engines[0].die()
            while api.client.engines[0].facts is not None:
                await asyncio.sleep(0.005)
            assert api.client.illnesses() == ["engine 0: the engine is not running"]
            engines[1].die()
            while api.client.facts is not None:
                await asyncio.sleep(0.005)
            assert "engine 0" in (api.illness or "")
            assert "engine 1" in (api.illness or "")
            with pytest.raises(Unavailable):
                await finish(api, asked())

    in_time(work())


def test_an_end_is_told_to_the_engine_that_runs_the_request(tmp_path: Path) -> None:
    """Both engines number their requests from 1."""

    async def work() -> None:
        async with pair(tmp_path) as (engines, api):
            runs = [asyncio.create_task(finish(api, asked())) for _ in range(2)]
            first, second = [(await engine.heard(Submit)).id for engine in engines]
            assert first == second
            assert [client.num_open for client in api.client.engines] == [1, 1]
            open_before = [client.load for client in api.client.engines]
            assert min(open_before) > 0
            runs[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await runs[0]
            assert sorted(client.num_open for client in api.client.engines) == [0, 1]
            idle = next(index for index, client in enumerate(api.client.engines) if not client.num_open)
            assert (await engines[idle].heard(Cancel)).ids == [first]
            assert api.client.engines[idle].load == 0
            other = 1 - idle
            engines[other].finish(second, 7)
            assert (await runs[1]).result.outputs[0].token_ids == [7]
            assert api.client.num_open == 0
            assert [client.load for client in api.client.engines] == [0, 0]

    in_time(work())


def test_who_waited_for_an_engine_that_died_goes_to_another_and_who_ran_to_its_successor(tmp_path: Path) -> None:
    """What ran may be what ended it, and the others' requests must not suffer from that."""

    async def work() -> None:
        async with pair(tmp_path) as (engines, api):
            runs = [asyncio.create_task(finish(api, asked(seed=number))) for number in range(4)]
            ran, waited = [await engines[0].heard(Submit) for _ in range(2)]
            for _ in range(2):
                engines[1].finish((await engines[1].heard(Submit)).id, 7)
            engines[0].say(Begun(ids=[ran.id]))
            await until(lambda: ticket_of(api, ran).begun)
            engines[0].die()
            moved = await engines[1].heard(Submit)
            assert moved.seed == waited.seed
            assert [client.num_open for client in api.client.engines] == [1, 1]
            engines[1].finish(moved.id, 8)
            engines[0].socket.close()
            engines[0] = ScriptedEngine(tmp_path / "first")
            again = await engines[0].heard(Submit)
            assert again.seed == ran.seed
            engines[0].finish(again.id, 9)
            found = {run.asked.params.seed: run.result.outputs[0].token_ids for run in await asyncio.gather(*runs)}
            assert sorted(found.values()) == [[7], [7], [8], [9]]
            check_empty(api)

    in_time(work())


def test_requests_are_looked_up_at_all_engines_that_answer(tmp_path: Path) -> None:
    def life(name: str, index: int, created: float) -> Life:
        return Life(name=name, index=index, created=created, finish_reason="stop", stats=STATS, device=Headroom())

    async def work() -> None:
        async with pair(tmp_path) as (engines, api):
            looking = asyncio.create_task(api.client.look(limit=2, timeout=PATIENCE))
            told = [[life("b", 1, 5.0), life("a", 0, 1.0)], [life("c", 0, 4.0), life("b", 0, 3.0)]]
            for engine, lives in zip(engines, told, strict=True):
                await engine.heard(Look)
                engine.say(Seen(lives=lives))
            assert [(found.name, found.index) for found in await looking] == [("b", 0), ("b", 1), ("c", 0)]
            engines[0].die()
            while api.client.engines[0].facts is not None:
                await asyncio.sleep(0.005)
            looking = asyncio.create_task(api.client.look("c", timeout=PATIENCE))
            await engines[1].heard(Look)
            engines[1].say(Seen(lives=[life("c", 0, 4.0)]))
            assert [found.name for found in await looking] == ["c"]

    in_time(work())


def test_the_requests_of_other_api_servers_count(tmp_path: Path) -> None:
    async def work() -> None:
        async with pair(tmp_path) as (engines, api):
            for turn in range(2):  # whichever engine would be next
                for engine, running in zip(engines, (3 - 3 * turn, 3 * turn), strict=True):
                    engine.say(figures(running, 100.0, []))
                while [bool(client.load) for client in api.client.engines] != [not turn, bool(turn)]:
                    await asyncio.sleep(0.005)
                for _ in range(2):
                    run = asyncio.create_task(finish(api, asked(max_tokens=1)))
                    engines[1 - turn].finish((await engines[1 - turn].heard(Submit)).id, 7)
                    await run

    in_time(work())


def step(at: float) -> StepFigures:
    return StepFigures(at=at, seconds=0.1, limit=0.05, decode_rows=1, prefill_rows=0, tokens=1)


def figures(factor: int, started: float, steps: list[float]) -> Stats:
    """Figures that are `factor` times those of factor 1."""
    return Stats(
        at=9.0 + factor,
        started=started,
        running=factor,
        waiting=2 * factor,
        pages_used=3 * factor,
        num_pages=100,
        steps=4 * factor,
        step_seconds=0.5 * factor,
        limit_seconds=0.25 * factor,
        counters={"generation_tokens": 5.0 * factor, "preemptions": 0.0},
        finished={"stop": factor, f"only {factor}": 1},
        histograms={"x": Distribution(counts=[factor, 0, 1], total=0.5 * factor)},
        recent=[step(at) for at in steps],
        gpus=[],
    )


def test_ratios_do_not_add_up() -> None:
    """How evenly ranks divide their tokens is said of the engine where it is worst."""
    one, ten = figures(1, 100.0, []), figures(10, 90.0, [])
    one.counters.update({"rebalanced: moves": 3.0, "rebalanced: before": 1.5, "rebalanced: after": 1.0})
    ten.counters.update({"rebalanced: moves": 4.0, "rebalanced: before": 1.25, "rebalanced: after": 1.125})
    counters = summed([(one, True), (ten, True), (figures(1, 80.0, []), True)]).counters
    assert counters["rebalanced: moves"] == 7
    assert (counters["rebalanced: before"], counters["rebalanced: after"]) == (1.5, 1.125)


def test_figures_of_several_engines_add_up_and_a_dead_one_runs_nothing() -> None:
    one, ten = figures(1, 100.0, [1.0, 3.0]), figures(10, 90.0, [2.0])
    both = summed([(one, True), (ten, True)])
    assert (both.running, both.waiting, both.pages_used, both.num_pages) == (11, 22, 33, 200)
    assert (both.steps, both.step_seconds, both.limit_seconds) == (44, 5.5, 2.75)
    assert both.counters == {"generation_tokens": 55.0, "preemptions": 0.0}
    assert both.finished == {"stop": 11, "only 1": 1, "only 10": 1}
    assert both.histograms["x"] == Distribution(counts=[11, 0, 2], total=5.5)
    assert [shape.at for shape in both.recent] == [1.0, 2.0, 3.0]
    assert both.started == 100.0
    died = summed([(one, True), (ten, False)])
    assert (died.running, died.waiting, died.pages_used) == (1, 2, 3)
    assert died.counters == both.counters
