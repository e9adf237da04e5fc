"""Clients' grammars share two compilers: slow grammars of one client cost another client no more than a moment."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan.request import SamplingParams
from ridgeline.core.plan.token_bits import unpacked
from ridgeline.serving import owner
from ridgeline.serving.errors import GrammarsBusy
from ridgeline.serving.grammars.checks import GrammarChecks
from ridgeline.serving.grammars.fair import FairPool, Full, Job
from ridgeline.serving.grammars.masks import Busy, Grammars
from ridgeline.serving.grpc.proto.ridgeline.v1 import inference_pb2 as pb
from ridgeline.transport.messages import Grammar, Submit
from ridgeline.weights.folder import EMBEDDED_MODEL
from tests.serving.apis.grpc.grpc_server import serve_grpc
from tests.serving.conftest import Server, StartServer

SMALL = Grammar(kind="regex", text="[a-z]{3}")


def slow_schema(number: int) -> dict[str, Any]:
    """It takes minutes to compile, and no time to look at. Each number is another grammar."""
    return {"type": "integer", "multipleOf": 1_000_003 + 2 * number}


def slow(number: int) -> Grammar:
    return Grammar(kind="json", text=json.dumps(slow_schema(number)))


@asynccontextmanager
async def checks_beside(*others: str, each: int = 4, seconds: float = 0.8) -> AsyncIterator[GrammarChecks]:
    """Checks while these clients have slow grammars under way. All of theirs must end with a word about each."""
    checks = GrammarChecks(seconds)

    async def check(client: str, grammar: Grammar) -> None:
        owner.take(client, None)
        await checks.check(grammar)

    tasks = [asyncio.create_task(check(c, slow(100 * i + n))) for i, c in enumerate(others) for n in range(each)]
    await asyncio.sleep(0.5)
    yield checks
    told = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(error) for error in told} <= {InvalidRequest, GrammarsBusy}
    assert "took longer than 0.8 s to compile; make it simpler" in str(told[0])


def test_a_neighbours_small_grammar_is_not_refused_and_hardly_waits() -> None:
    async def work() -> None:
        async with checks_beside("hostile") as checks:
            owner.take("neighbour", None)
            for number in range(4):
                await checks.check(Grammar(kind="regex", text=f"[a-z]{{3}}{number}"))

    asyncio.run(work())


def test_who_waits_too_long_is_told_that_the_server_is_busy() -> None:
    """And not that the grammar is wrong: that is said only of what took too long itself."""

    async def work() -> None:
        checks = GrammarChecks(0.8)
        waiting = (checks.check(grammar) for grammar in (*map(slow, range(5)), SMALL))
        told = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(told[0], InvalidRequest)
        assert isinstance(told[-1], GrammarsBusy)
        assert (told[-1].status, told[-1].retry_after) == (503, 2)
        assert "no time" in str(told[-1])
        await checks.check(SMALL)

    asyncio.run(work())


def test_a_verdict_is_kept() -> None:
    async def work() -> None:
        checks = GrammarChecks(60)
        with pytest.raises(InvalidRequest, match="regex"):
            await checks.check(Grammar(kind="regex", text="("))
        await checks.check(SMALL)
        checks._compile = None  # type: ignore[assignment]
        await checks.check(SMALL)
        with pytest.raises(InvalidRequest, match="regex"):
            await checks.check(Grammar(kind="regex", text="("))

    asyncio.run(work())


def test_a_grammar_may_speak_of_the_models_own_tokens() -> None:
    """By name, where they have one, and by number."""

    async def work() -> None:
        checks = GrammarChecks(60, {"<tool_call>": 3, "<|end|>": 700}, 1000)
        for text in ("start: <tool_call> /[a-z]{3}/ <|end|>", "start: <[999]>", "start: <tool_call>"):
            await checks.check(Grammar(kind="grammar", text=text))
        for text in ("start: <nobody>", "start: <[99999]>"):
            with pytest.raises(InvalidRequest, match="cannot be used"):
                await checks.check(Grammar(kind="grammar", text=text))

    asyncio.run(work())


def test_turns_go_round_and_one_owner_never_holds_every_thread() -> None:
    pool, gate, order, running = FairPool(3, "test"), threading.Event(), list[str](), list[Job[None]]()

    def note(name: str) -> None:
        gate.wait()
        order.append(name)

    blocked = [pool.submit("a", gate.wait) for _ in range(4)]
    deadline = time.monotonic() + 20
    while sum(job.started is not None for job in blocked) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert [job.started is not None for job in blocked] == [True, True, False, False]
    assert pool.submit("b", lambda: 7).future.result(20) == 7  # on the third thread
    assert blocked[2].started is None
    running += [pool.submit(name, lambda name=name: note(name)) for name in "aaabbbccc"]  # type: ignore[misc]
    assert running[0].future.cancel()
    gate.set()
    for job in running[1:]:
        job.future.result(20)
    assert sorted(order) == list("aabbbccc")
    assert order.index("c") < 6  # not behind all of a's and b's


def test_an_owner_holds_no_more_threads_than_it_may() -> None:
    pool, gate = FairPool(4, "test", held=2), threading.Event()
    blocked = [pool.submit("a", gate.wait) for _ in range(3)]
    assert [pool.submit("b", lambda: 7).future.result(20) for _ in range(2)] == [7, 7]
    deadline = time.monotonic() + 20
    while sum(job.started is not None for job in blocked) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert pool.submit("b", lambda: 7).future.result(20) == 7
    assert [job.started is not None for job in blocked] == [True, True, False]
    gate.set()


def test_nothing_is_kept_of_owners_that_are_done() -> None:
    """Their number has no bound: addresses cost nothing."""
    pool = FairPool(2, "test")
    for job in [pool.submit(f"owner {number}", lambda: None) for number in range(100)]:
        job.future.result(20)
    deadline = time.monotonic() + 20
    while pool._running and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not pool._running
    assert not pool._waiting


def test_an_owner_that_queues_without_end_fills_only_its_own_queue() -> None:
    pool, gate = FairPool(2, "test"), threading.Event()

    def flood() -> None:
        while True:
            pool.submit("a", gate.wait)

    with pytest.raises(Full):
        flood()
    assert pool.submit("b", lambda: 1).future.result(20) == 1
    gate.set()


# ---- by HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed(start_server: StartServer) -> Iterator[Server]:
    with start_server(api_key=("mallory", "alice"), grammar_timeout=0.8) as server:
        yield server


def ask(server: Server, key: str, **structured: Any) -> httpx.Response:
    body = {"prompt": "x", "max_tokens": 2, "structured_outputs": structured}
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)


def test_two_clients_by_http(keyed: Server) -> None:
    """The attack that it was: slow grammars of one, small ones of another, on one server."""
    told: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda n=n: told.append(ask(keyed, "mallory", json=slow_schema(n)))) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.4)
    answers = [ask(keyed, "alice", regex=f"[a-z]{{3}}[{number}]") for number in range(4)]
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 4
    assert {answer.status_code for answer in told} == {400, 503}
    for answer in told:
        error = answer.json()["error"]
        if answer.status_code == 503:
            assert (error["code"], answer.headers["retry-after"]) == ("grammars_busy", "2")
        else:
            assert "took longer than 0.8 s" in error["message"]
            assert error["param"] == "structured_outputs"
    assert keyed.wait_idle(5)
    assert ask(keyed, "mallory", regex="[a-z]{2}").status_code == 200  # no process is left with what does not end
    idle = keyed.api.grammar_checks._compile._idle
    assert 1 <= len(idle) <= 2
    assert all(child.usable for child in idle)


def test_grpc_tells_clients_apart_too(engine_socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their keys; where none is asked for, by their addresses."""
    owners: list[str] = []
    monkeypatch.setattr(
        "ridgeline.serving.generation.service.trace_parent.current", lambda: owners.append(owner.current())
    )
    asked = pb.GenerateRequest(text="x", sampling=pb.Sampling(max_tokens=1))
    with serve_grpc(engine_socket, api_key=("mallory", "alice")) as served:
        for key in ("mallory", "alice", "mallory"):
            list(served.stub.Generate(asked, metadata=[("authorization", f"Bearer {key}")], timeout=30))
    first, second, third = owners
    assert first == third != second
    assert "mallory" not in first
    with serve_grpc(engine_socket) as served:
        list(served.stub.Generate(asked, metadata=[("authorization", "Bearer anything")], timeout=30))
    assert owners[-1] == owner.PEER + "unix"  # the tests' address: no port, nor what was offered as a key


# ---- in the engine's process ----------------------------------------------------------------------------------------


def submit(number: int, grammar: Grammar, owner: str = "a") -> Submit:
    return Submit(
        id=number, name="x", index=0, prompt_token_ids=[1], params=SamplingParams(), seed=0, max_total_tokens=9,
        stop_ids=[], eos_ids=[], cache_salt="", priority=0, arrival=0.0, grammar=grammar, owner=owner,
    )  # fmt: skip


def decided(grammars: Grammars, count: int = 1) -> dict[int, Any]:
    found: dict[int, Any] = {}
    deadline = time.monotonic() + 30
    while len(found) < count and time.monotonic() < deadline:
        found |= {submitted.id: mask for _, submitted, mask in grammars.done()}
        time.sleep(0.001)
    return found


def test_completions_of_one_grammar_share_its_compilation_and_nothing_else() -> None:
    grammars = Grammars(EMBEDDED_MODEL, 4096, [0], 60)
    for number in range(4):
        grammars.compile(b"face", submit(number, SMALL))
    assert len({id(waiting.job) for waiting in grammars._waiting.values()}) == 1
    first, second, *_ = decided(grammars, 4).values()
    letters = first.allowed()
    assert np.array_equal(letters, second.allowed())
    token = int(np.flatnonzero(unpacked(letters, 4096))[0])
    for _ in range(3):
        if not np.array_equal(first.allowed(), letters):
            break
        first.accept(token)
    assert not np.array_equal(first.allowed(), letters)  # it has moved on
    assert np.array_equal(second.allowed(), letters)  # and moved no other matcher
    grammars.compile(b"face", submit(9, SMALL))
    assert np.array_equal(decided(grammars)[9].allowed(), letters)  # nor the one that is kept
    assert not grammars.pending


def test_the_engine_takes_owners_in_turn_and_says_busy_rather_than_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, compiling = threading.Event(), Grammars._compiled

    def compile_slowly(self: Grammars, grammar: Grammar, owner: str) -> Any:
        if grammar != SMALL:  # a thread cannot be ended, so this one only waits
            gate.wait(60)
        return compiling(self, grammar, owner)

    monkeypatch.setattr(Grammars, "_compiled", compile_slowly)
    grammars = Grammars(EMBEDDED_MODEL, 4096, [0], 0.2)
    for number in range(3):  # past an API server that did not look at them
        grammars.compile(b"face", submit(number, Grammar(kind="json", text=f'{{"const": {number}}}'), "hostile"))
    grammars.compile(b"face", submit(10, SMALL, "neighbour"))
    found = decided(grammars, 4)
    assert hasattr(found.pop(10), "allowed")
    assert {number: type(error) for number, error in found.items()} == dict.fromkeys(range(3), Busy)
    assert not grammars.pending
    grammars.compile(b"face", submit(11, SMALL, "neighbour"))
    assert grammars.cancel(b"face", [11, 12]) == [11]
    gate.set()
