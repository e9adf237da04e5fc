"""Requests without a token outlive their engine: those that wait, and those whose step it did not end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline_bench.scripts.served import Served, children
from tests.serving.conftest import PATIENCE

pytestmark = pytest.mark.dealt

POISON = 4001  # a token that ends the engine in whose step it is
SABOTAGE = f"""
import os, signal, sys
if "ridgeline.serving.processes.engine_process" in " ".join(sys.orig_argv):
    if os.path.exists(os.environ["NO_ENGINE"]):
        os._exit(1)
    from ridgeline.worker.runner import Runner
    forward = Runner.forward
    def poisoned(self, plan, *more):
        if any({POISON} in span.token_ids.tolist() for span in plan.spans):
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(self, plan, *more)
    Runner.forward = poisoned
"""
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
LONG = [{"prompt": [9, 8, number], "max_tokens": 2000, "temperature": 0, "ignore_eos": True} for number in (1, 2)]
SHORT = LONG[0] | {"max_tokens": 400}
WAITING = [
    {"prompt": "def f(", "max_tokens": 12, "temperature": 1, "seed": 5, "ignore_eos": True},
    {"prompt": "class A:", "max_tokens": 30, "temperature": 0, "logprobs": 1, "stop": ["\n"], "ignore_eos": True},
    {"prompt": "x = ", "max_tokens": 30, "temperature": 1, "seed": 6, "structured_outputs": {"json": SCHEMA}},
]


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, Any]:
    """Status of a completion and its tokens, or the sentence that says why there are none."""
    answer = await client.post("/v1/completions", json={**body, "return_token_ids": True})
    told = answer.json()
    return answer.status_code, told["choices"][0]["token_ids"] if answer.is_success else told["error"]["message"]


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not await asyncio.to_thread(holds):
        assert time.monotonic() < deadline, "it did not come to that"
        await asyncio.sleep(0.02)


async def queue(server: Served, client: httpx.AsyncClient, running: list[Any], waiting: list[Any]) -> list[Any]:
    """Send requests, of which the first have tokens, and the others wait behind them."""
    before = server.metric("vllm:generation_tokens_total")
    tasks = [asyncio.create_task(ask(client, body)) for body in running]
    await until(lambda: server.metric("vllm:generation_tokens_total") >= before + 2 * len(running))
    for number, body in enumerate(waiting, 1):
        tasks.append(asyncio.create_task(ask(client, body)))
        await until(lambda number=number: server.metric("vllm:num_requests_waiting") == number)  # type: ignore[misc]
    return tasks


async def lose(server: Served, running: list[Any], victim: Callable[[], int]) -> None:
    """Kill a process of the engine. Who waited gets the same answer as ever, from the next one."""
    engine = server.engine
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
        want = [await ask(client, body) for body in WAITING]
        assert [status for status, _ in want] == [200] * len(want), want
        tasks = await queue(server, client, running, WAITING)
        os.kill(victim(), signal.SIGKILL)
        for task in tasks[: len(running)]:
            status, told = await task
            assert (status, told) == (503, "the engine died while it ran this request; try again.")
        assert (await asyncio.to_thread(server.get, "/health/ready"))[0] == 503
        assert [await task for task in tasks[len(running) :]] == want
    assert server.engine != engine
    assert server.get("/health/ready")[0] == 200
    assert server.wait_idle()


NOTED = """
import os, pathlib, sys
class Torch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            found = pathlib.Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            with open(os.environ["NOTES"], "a") as notes:
                print(len(found), file=notes)
            sys.meta_path.remove(self)
if "ridgeline.serving.processes.engine_process" in " ".join(sys.orig_argv):
    sys.meta_path.insert(0, Torch())
"""


@pytest.mark.thorough
def test_who_waits_outlives_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so that the next engine comes soon, both its ranks import torch while it does."""
    (tmp_path / "sitecustomize.py").write_text(NOTED)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with Served("-tp", "2", "--device", "cpu", "--dtype", "float32", "--max-num-seqs", "2") as server:
        asyncio.run(lose(server, LONG, lambda: ranks_of(server)[1]))
    assert (tmp_path / "notes").read_text() == "2\n2\n", "children of each engine when it began to import torch"


def ranks_of(server: Served) -> list[int]:
    found = [pid for pid in children(server.engine) if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(found) == 2
    return found


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """A server of one slot whose engine is easy to kill, and the file that keeps others from starting."""
    folder = tmp_path_factory.mktemp("fragile")
    (folder / "sitecustomize.py").write_text(SABOTAGE)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("NO_ENGINE", str(folder / "none"))
        patched.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        with Served("--dtype", "float32", "--max-num-seqs", "1") as server:
            yield server, folder / "none"


def test_who_waits_outlives_the_engine(fragile: tuple[Served, Path]) -> None:
    server, _ = fragile
    asyncio.run(lose(server, LONG[:1], lambda: server.engine))


@pytest.mark.thorough  # without processes: tests/serving/generation/test_engine_client.py
def test_a_request_that_ends_engines_is_failed_and_others_go_on(fragile: tuple[Served, Path]) -> None:
    server, _ = fragile

    async def work() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
            want = await ask(client, WAITING[0])
            restarts = server.metric("ridgeline:engine_restarts_total")
            poison = {"prompt": [5, POISON], "max_tokens": 2}
            first, deadly, other, left = await queue(server, client, [SHORT], [poison, WAITING[0], LONG[0]])
            assert (await first)[0] == 200
            await until(lambda: server.get("/health/ready")[0] == 503)
            left.cancel()
            assert await deadly == (503, "the engine died while it ran this request; try again.")
            assert await other == want
            assert server.metric("ridgeline:engine_restarts_total") == restarts + 3
            assert server.wait_idle()

    asyncio.run(work())


def test_who_waits_is_told_when_no_engine_comes_any_more(fragile: tuple[Served, Path]) -> None:
    """The last test of this server: it ends here."""
    server, none = fragile

    async def work() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
            tasks = await queue(server, client, LONG[:1], WAITING)
            none.touch()
            os.kill(server.engine, signal.SIGKILL)
            told = [await task for task in tasks]
            assert [status for status, _ in told] == [503] * len(tasks)
            assert {sentence for _, sentence in told[1:]} == {
                "the server ends, and this request had not; send it to another."
            }

    asyncio.run(work())
    assert server.process.wait(PATIENCE) == 1
