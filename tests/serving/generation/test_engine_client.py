"""An API server's end of the wire when things go wrong: an engine that dies in the middle, readers that are late,
backlogs.

Where moments matter, the engine is a script on the real socket; its process is one that can be killed.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ridgeline.core.plan.request import RequestStats, SamplingParams
from ridgeline.core.settings.serving import NamedModel, ServeConfig
from ridgeline.kernels.base.cost import Headroom
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import BadRequest, Overloaded, SlowReader, TimedOut, Unavailable
from ridgeline.serving.generation import engine_client
from ridgeline.serving.generation.service import GenerationRequest, Run
from ridgeline.serving.generation.ticket import RequestTicket
from ridgeline.transport.messages import (
    Begun,
    Cancel,
    Ended,
    EngineFacts,
    Event,
    FromFace,
    Hello,
    Progress,
    Submit,
    Welcome,
)
from ridgeline.transport.zmq import EngineSocket
from ridgeline.weights.folder import EMBEDDED_MODEL
from tests.serving.conftest import MODEL, PATIENCE, open_api_server, start_engine, stop_engine

FACTS = {
    "model": MODEL,
    "folder": str(EMBEDDED_MODEL),
    "max_model_len": 4096,
    "vocab_size": 4096,
    "eos_ids": [0],
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "block_size": 16,
    "num_pages": 100_000,
    "cache_tokens": 1_000_000,
    "dtype": "float32",
    "device": "cpu",
    "enable_prefix_caching": True,
}
STATS = RequestStats(
    arrival=0.0,
    first_scheduled=0.1,
    first_token=0.2,
    finished=1.0,
    prompt_tokens=1,
    cached_tokens=0,
    output_tokens=1,
)


class ScriptedEngine:
    """Says what a test wants it to say."""

    def __init__(self, path: Path) -> None:
        self.socket = EngineSocket(str(path))
        self.process = subprocess.Popen(["sleep", "1000"])
        self.api = b""
        self._unread: list[FromFace] = []

    def _hear(self) -> None:
        """Take what has come, and answer greetings."""
        for connection, message in self.socket.receive(0):
            self.api = connection
            self._unread.append(message)
            if isinstance(message, Hello):
                self.say(Welcome(facts=EngineFacts(process_id=self.process.pid, **FACTS)))

    async def greet(self, api: ApiServer) -> None:
        """Answer greetings until the API server knows the engine. It greets again if an answer comes late."""

        def known() -> bool:
            self._hear()
            return api.client.facts is not None

        await until(known)

    async def heard(self, kind: type[Any]) -> Any:
        """The next message of this kind; greetings are answered meanwhile."""
        async with asyncio.timeout(PATIENCE):
            while True:
                self._hear()
                found = next((message for message in self._unread if isinstance(message, kind)), None)
                if found is not None:
                    self._unread.remove(found)
                    return found
                await asyncio.sleep(0.005)

    def say(self, message: Any) -> None:
        assert self.socket.send(self.api, message)

    def tokens(self, number: int, *token_ids: int) -> None:
        self.say(Progress(ids=[number] * len(token_ids), token_ids=list(token_ids), events=[], ended=[]))

    def finish(self, number: int, token_id: int, *before: int) -> None:
        self.say(
            Progress(
                ids=[number] * len(before),
                token_ids=list(before),
                events=[Event(id=number, token_id=token_id, finish_reason="length")],
                ended=[ended(number)],
            )
        )

    def die(self) -> None:
        self.process.kill()
        self.process.wait()


def ended(number: int) -> Ended:
    return Ended(id=number, stats=STATS, device=Headroom())


@asynccontextmanager
async def scripted(folder: Path, **settings: Any) -> AsyncIterator[tuple[ScriptedEngine, ApiServer]]:
    """An engine and an API server that has greeted it. settings: of ServeConfig."""
    engine = ScriptedEngine(folder / "socket")
    api = ApiServer.build(
        ServeConfig(**settings), NamedModel(str(EMBEDDED_MODEL), (MODEL,), (str(folder / "socket"),)), "face"
    )
    running = asyncio.create_task(api.client.run())
    try:
        await engine.greet(api)
        yield engine, api
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        engine.die()
        engine.socket.close()


def asked(**more: Any) -> GenerationRequest:
    fields: dict[str, Any] = {"max_tokens": 2000} | more
    timeout = fields.pop("timeout", 0.0)
    return GenerationRequest(id="r", prompt_token_ids=[5], params=SamplingParams(**fields), timeout=timeout)


async def finish(api: ApiServer, request: GenerationRequest) -> Run:
    async with api.service.run(request) as run:
        await run.finish()
    return run


def in_time(work: Coroutine[Any, Any, None], seconds: float = PATIENCE) -> None:
    """What hangs fails."""
    asyncio.run(asyncio.wait_for(work, seconds))


# ---- an engine that dies ------------------------------------------------------------------------------------------


@asynccontextmanager
async def successor(engine: ScriptedEngine, api: ApiServer, folder: Path) -> AsyncIterator[ScriptedEngine]:
    """End an engine and start the next one. The API server knows it."""
    engine.die()
    engine.socket.close()
    await until(lambda: api.client.facts is None)  # or what was sent to the old one may still reach the next
    following = ScriptedEngine(folder / "socket")
    try:
        await following.greet(api)
        yield following
    finally:
        following.die()
        following.socket.close()


async def begin(engine: ScriptedEngine, api: ApiServer, **more: Any) -> tuple[asyncio.Task[Run], Submit]:
    """A request that has reached the engine, and what the engine was told of it."""
    task = asyncio.create_task(finish(api, asked(**more)))
    return task, await engine.heard(Submit)


def ticket_of(api: ApiServer, submit: Submit) -> RequestTicket:
    return api.client.engines[0]._tickets[submit.id]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():
            await asyncio.sleep(0.005)


def check_empty(api: ApiServer) -> None:
    assert (api.client.num_open, api.service.admission.open_requests) == (0, 0)
    assert api.service.admission.open_tokens == 0
    assert [engine.load for engine in api.client.engines] == [0] * len(api.client.engines)


def test_what_is_sent_while_an_engine_dies_reaches_the_next_one(tmp_path: Path) -> None:
    """The connection is gone before the process is: a large process takes seconds to end. Questions sent meanwhile are
    over with the process."""

    async def work() -> None:
        async with scripted(tmp_path) as (engine, api):
            engine.socket.close()
            await asyncio.sleep(0.2)
            tries = [asyncio.create_task(finish(api, asked(n=2, seed=number))) for number in range(3)]
            asking = asyncio.create_task(api.client.ask(timeout=PATIENCE))
            await asyncio.sleep(0.1)
            assert not any(task.done() for task in tries)
            async with successor(engine, api, tmp_path) as following:
                assert await asking is None
                for _ in range(6):
                    following.finish((await following.heard(Submit)).id, 700)
                assert [[o.token_ids for o in (await task).result.outputs] for task in tries] == [[[700], [700]]] * 3
            check_empty(api)

    in_time(work())


def test_requests_without_a_token_go_to_the_next_engine_as_they_were(tmp_path: Path) -> None:
    """In their old order, and before those that come later. What had begun to be answered ends."""

    async def work() -> None:
        async with scripted(tmp_path) as (engine, api):
            spoken, first = await begin(engine, api)
            scored, second = await begin(engine, api, prompt_logprobs=0)
            others = [await begin(engine, api, seed=number) for number in range(4)]
            engine.tokens(first.id, 700)
            engine.say(Progress(ids=[], token_ids=[], events=[Event(id=second.id, token_id=-1)], ended=[]))
            await until(lambda: all(ticket_of(api, each).submit is None for each in (first, second)))
            async with successor(engine, api, tmp_path) as following:
                for task in (spoken, scored):
                    with pytest.raises(Unavailable, match="died"):
                        await task
                late = asyncio.create_task(finish(api, asked(seed=9)))
                heard = [await following.heard(Submit) for _ in range(5)]
                assert [replace(each, id=0) for each in heard[:4]] == [replace(each, id=0) for _, each in others]
                assert heard[4].seed != heard[3].seed
                assert len({each.id for each in heard}) == 5
                for each in heard:
                    following.finish(each.id, each.id)
                tasks = [*(task for task, _ in others), late]
                assert [(await task).result.outputs[0].token_ids for task in tasks] == [[each.id] for each in heard]
            check_empty(api)

    in_time(work())


def test_an_engine_that_is_given_up_is_dead_to_its_requests(tmp_path: Path) -> None:
    """It hangs and lives: what had begun to come ends in words, the others go to the next one, and a greeting that it
    answers after all is not heard."""

    async def work() -> None:
        async with scripted(tmp_path) as (engine, api):
            (spoken, first), (waits, second) = [await begin(engine, api, seed=number) for number in range(2)]
            engine.tokens(first.id, 700)
            await until(lambda: ticket_of(api, first).submit is None)
            api.client.give_up(engine.process.pid + 1, "is another")
            await asyncio.sleep(0.05)
            assert api.client.facts is not None
            api.client.give_up(engine.process.pid, "has not ended a step for 60 s")
            with pytest.raises(Unavailable, match="the engine has not ended a step for 60 s, so it is replaced"):
                await spoken
            assert api.illness == "the engine has not ended a step for 60 s, and is replaced"
            await engine.heard(Hello)
            await asyncio.sleep(0.1)
            assert api.client.facts is None
            async with successor(engine, api, tmp_path) as following:
                heard = await following.heard(Submit)
                assert heard.seed == second.seed
                following.finish(heard.id, 700)
                assert (await waits).result.outputs[0].token_ids == [700]
                assert api.illness is None
            check_empty(api)

    in_time(work())


def test_who_leaves_while_there_is_no_engine_is_forgotten(tmp_path: Path) -> None:
    async def work() -> None:
        async with scripted(tmp_path) as (engine, api):
            (left, _), (stays, submit) = [await begin(engine, api, seed=number) for number in range(2)]
            engine.die()
            await until(lambda: api.client.facts is None)
            assert api.client.num_open == 2
            assert api.illness is not None
            with pytest.raises(Unavailable, match="not running"):  # who comes now, as ever
                await finish(api, asked())
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            assert api.client.num_open == 1
            async with successor(engine, api, tmp_path) as following:
                heard = await following.heard(Submit)
                assert heard.seed == submit.seed
                following.finish(heard.id, 700)
                assert (await stays).result.outputs[0].token_ids == [700]
                assert not any(isinstance(message, Submit) for message in following._unread)
            check_empty(api)

    in_time(work())


def test_a_request_that_engines_die_of_is_failed(tmp_path: Path) -> None:
    """It ran in every one of them, and another that waited goes on. But no request waits for ever either: the server
    would be given up with the fifth engine."""

    async def work() -> None:
        async with AsyncExitStack() as lives:
            engine, api = await lives.enter_async_context(scripted(tmp_path))
            (poison, first), (waiting, _) = [await begin(engine, api, seed=number) for number in range(2)]
            heard = first
            for _ in range(3):
                engine.say(Begun(ids=[heard.id]))
                await until(lambda heard=heard: ticket_of(api, heard).begun)  # type: ignore[misc]
                engine = await lives.enter_async_context(successor(engine, api, tmp_path))
                heard = await engine.heard(Submit)
            with pytest.raises(Unavailable, match="died"):
                await asyncio.wait_for(poison, PATIENCE)
            assert heard.seed != first.seed
            assert not waiting.done()
            await lives.enter_async_context(successor(engine, api, tmp_path))
            with pytest.raises(Unavailable, match="died"):
                await asyncio.wait_for(waiting, PATIENCE)
            check_empty(api)

    in_time(work())


@pytest.mark.parametrize("ends", ["in time", "with the API server"])
def test_waiting_for_another_engine_ends(ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with AsyncExitStack() as left:
            engine, api = await left.enter_async_context(scripted(tmp_path))
            task, _ = await begin(engine, api)
            engine.die()
            await until(lambda: api.client.facts is None)
            assert not task.done()
            if ends == "with the API server":
                await left.aclose()
            with pytest.raises(Unavailable, match="died"):
                await task
            check_empty(api)

    if ends == "in time":
        monkeypatch.setattr(engine_client, "RETURN", 0.5)
    in_time(work())


@pytest.mark.thorough
def test_a_storm_of_requests_outlives_the_engine(tmp_path: Path) -> None:
    """Killed in the middle of it all, and started again: every request has an answer or is told, and none is lost."""

    async def client(api: ApiServer, told: list[str], most: int) -> None:
        while told.count("ended in the second life") < 100:
            try:
                run = await finish(api, asked(n=2, max_tokens=most))
                assert all(len(output.token_ids) <= most for output in run.result.outputs)
                told.append("ended" if api.client.lives == 1 else "ended in the second life")
            except Unavailable:
                told.append("unavailable")
                await asyncio.sleep(0.05)

    async def work() -> None:
        engine = start_engine(tmp_path / "socket")
        try:
            async with open_api_server(tmp_path / "socket") as api:
                told: list[str] = []
                # Some are so long that they have tokens whenever the engine dies: the others may all go on in the next
                clients = [asyncio.create_task(client(api, told, most)) for most in (6, 6, 6, 60) * 10]
                while told.count("ended") < 10:  # in the middle of it all, on a machine however slow
                    await asyncio.sleep(0.05)
                await asyncio.to_thread(stop_engine, engine)
                engine = await asyncio.to_thread(start_engine, tmp_path / "socket")
                await asyncio.gather(*clients)
                assert {"ended", "unavailable", "ended in the second life"} == set(told)
                assert (api.client.num_open, api.service.admission.open_requests) == (0, 0)
                assert api.service.admission.open_tokens == 0
                stats = await api.client.ask()
                assert stats is not None
                assert (stats.running, stats.waiting) == (0, 0)
        finally:
            stop_engine(engine)

    in_time(work(), 2 * PATIENCE)


# ---- readers that are late ----------------------------------------------------------------------------------------


def test_an_end_that_comes_while_nobody_waits_is_seen(tmp_path: Path) -> None:
    """One completion was stopped by a string and waits for its figures; they come while its reader is busy with the
    last of the other."""

    async def work() -> None:
        async with scripted(tmp_path) as (engine, api):
            [stop] = api.tokenizer.encode("=", add_special_tokens=False)
            pieces = 0
            async with api.service.run(asked(n=2, stop=["="])) as run:
                first, second = [(await engine.heard(Submit)).id for _ in range(2)]
                engine.tokens(first, stop)
                engine.finish(second, 700)
                await asyncio.sleep(0.2)  # both are there when the reader looks
                async for _ in run:
                    pieces += 1
                    if pieces == 2:
                        assert (await engine.heard(Cancel)).at_token is not None
                        engine.say(Progress(ids=[], token_ids=[], events=[], ended=[ended(first)]))
                        await asyncio.sleep(0.2)
            assert [output.finish_reason for output in run.result.outputs] == ["stop", "length"]
            assert None not in run.endings

    in_time(work())


def test_a_reader_that_falls_behind_twice_at_once_is_cut_once(tmp_path: Path) -> None:
    """A token and an event of one step, both too many."""

    async def work() -> None:
        async with scripted(tmp_path, stream_buffer=4) as (engine, api):
            async with api.service.run(asked()) as run:
                number = (await engine.heard(Submit)).id
                event = Event(id=number, token_id=9)
                engine.say(Progress(ids=[number] * 6, token_ids=[9] * 6, events=[event], ended=[]))
                assert (await engine.heard(Cancel)).ids == [number]
                with pytest.raises(SlowReader):
                    await run.finish()
            other = asyncio.create_task(finish(api, asked()))
            engine.finish((await engine.heard(Submit)).id, 700)
            assert (await other).result.outputs[0].token_ids == [700]

    in_time(work())


def test_what_has_ended_is_read_to_its_end(tmp_path: Path) -> None:
    """There is nothing left to cut."""

    async def work() -> None:
        async with scripted(tmp_path, stream_buffer=4) as (engine, api):
            async with api.service.run(asked()) as run:
                engine.finish((await engine.heard(Submit)).id, 700, *range(600, 604))
                await asyncio.sleep(0.2)
                await run.finish()
            assert run.result.outputs[0].token_ids == [600, 601, 602, 603, 700]

    in_time(work())


def test_a_backlog_is_no_slow_reader(tmp_path: Path) -> None:
    """The whole process stood still for a while: its readers are not to blame, and they get their turn."""

    async def work() -> None:
        async with scripted(tmp_path, stream_buffer=16) as (engine, api):
            reading = asyncio.create_task(finish(api, asked()))
            number = (await engine.heard(Submit)).id
            for _ in range(500):
                engine.tokens(number, 700)
            engine.finish(number, 701)
            time.sleep(0.3)
            assert len((await reading).result.outputs[0].token_ids) == 501

    in_time(work())


def test_a_server_that_is_slow_itself_is_no_slow_reader(tmp_path: Path) -> None:
    """The logprobs of a prompt over a whole vocabulary take it longer than the tokens behind them take the engine."""

    async def read(api: ApiServer, busy: asyncio.Event) -> list[int]:
        async with api.service.run(asked(n=2)) as run:
            async for piece in run:
                if piece.token_ids[0] == 699:
                    with run.working():
                        busy.set()
                        await asyncio.sleep(0.3)
            return [len(output.token_ids) for output in run.result.outputs]

    async def work() -> None:
        async with scripted(tmp_path, stream_buffer=4) as (engine, api):
            busy = asyncio.Event()
            reading = asyncio.create_task(read(api, busy))
            first, second = [(await engine.heard(Submit)).id for _ in range(2)]
            engine.tokens(first, 699)
            await busy.wait()
            for number in (first, second):
                for _ in range(20):
                    engine.tokens(number, 700)
            await asyncio.sleep(0.4)
            engine.finish(first, 701)
            engine.finish(second, 701)
            assert await reading == [22, 21]

    in_time(work())


def test_a_timeout_is_one_even_where_there_is_always_something_to_read(tmp_path: Path) -> None:
    async def speak(engine: ScriptedEngine, number: int) -> None:
        while True:
            engine.tokens(number, 700)
            await asyncio.sleep(0.005)

    async def read_slowly(run: Run) -> None:
        async for _ in run:
            await asyncio.sleep(0.05)

    async def work() -> None:
        async with scripted(tmp_path) as (engine, api):
            began = time.monotonic()
            async with api.service.run(asked(timeout=0.5)) as run:
                speaking = asyncio.create_task(speak(engine, (await engine.heard(Submit)).id))
                with pytest.raises(TimedOut, match=r"0\.5 s"):
                    await read_slowly(run)
            assert time.monotonic() - began >= 0.5
            speaking.cancel()

    in_time(work())


# ---- who is let in ------------------------------------------------------------------------------------------------


def test_a_request_that_cannot_begin_leaves_nothing_open(
    api_server_of: Callable[..., AbstractAsyncContextManager[ApiServer]],
) -> None:
    async def work() -> None:
        async with api_server_of() as api:
            request = GenerationRequest(id="r", prompt_token_ids=[2**40], params=SamplingParams())
            with pytest.raises(BadRequest, match="vocabulary"):  # by the engine, if no check came before
                await finish(api, request)
            assert (api.client.num_open, api.service.admission.open_requests) == (0, 0)
            assert api.service.admission.open_tokens == 0

    in_time(work())


def test_what_could_never_be_let_in_is_no_matter_of_trying_again(
    api_server_of: Callable[..., AbstractAsyncContextManager[ApiServer]],
) -> None:
    async def work() -> None:
        async with api_server_of(ServeConfig(max_queue_requests=2, max_queue_tokens=100)) as api:
            for request, param in ((asked(n=3, max_tokens=5), "n"), (asked(max_tokens=500), "max_tokens")):
                with pytest.raises(BadRequest) as caught:
                    await finish(api, request)
                assert caught.value.param == param
            async with api.service.run(asked(n=2, max_tokens=40)):
                for request in (asked(max_tokens=5), asked(max_tokens=50)):
                    with pytest.raises(Overloaded):
                        await finish(api, request)
            await finish(api, asked(max_tokens=50))

    in_time(work())
