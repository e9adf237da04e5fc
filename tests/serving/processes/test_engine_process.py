"""The engine's process against a device that is gone, a socket that any process of this user can write to, and
signals."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket as sockets
import subprocess
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
import zmq

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import DeviceLost
from ridgeline.engine.engine import FAILED_STEPS
from ridgeline.serving.processes.engine_host import StepBound
from ridgeline.transport.messages import Cancel, Hello, Look, Submit, Welcome, decode_from_engine, encode
from ridgeline.transport.zmq import LARGEST
from ridgeline.worker.local import _lost
from ridgeline.worker.runner import Runner
from ridgeline_bench.scripts.served import Served
from tests.serving.conftest import PATIENCE, open_api_server, start_engine, stop_engine

# A worker whose device is lost after so many steps: what torch raises then, and goes on raising.
SABOTAGE = """
import os, sys
import torch
from ridgeline.worker.runner import Runner
forward, count = Runner.forward, 0
def lost(self, plan):
    global count
    count += 1
    if os.path.exists(os.environ["LOSE_DEVICE"]):
        raise ERROR
    return forward(self, plan)
Runner.forward = lost
"""
LOST = {
    "accelerator": 'torch.AcceleratorError("CUDA error: an illegal memory access was encountered")',
    "runtime": 'RuntimeError("CUDA error: unspecified launch failure")',
    "assert": 'RuntimeError("CUDA error: device-side assert triggered")',
    "unknown": 'RuntimeError("something that nobody has seen before")',
}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


# ---- a lost device --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["accelerator", "unknown"])
def test_the_offline_api_says_that_the_device_is_lost(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(max_model_len=128) as llm:
        assert len(llm.generate("a", GREEDY)[0].outputs[0].token_ids) == 4
        raised = eval(LOST[error], {"torch": torch})
        monkeypatch.setattr(Runner, "forward", _raising(raised))
        monkeypatch.setattr("ridgeline.engine.engine.FAILING_SECONDS", 0.0)
        told: list[str | None] = []
        with pytest.raises(DeviceLost, match="does no work any more") as lost:
            _ask_for_ever(llm, told)
        assert str(raised) in str(lost.value)
        assert set(told) == (set() if error == "accelerator" else {"error"})
        with pytest.raises(DeviceLost):
            llm.generate("d", GREEDY)


def _ask_for_ever(llm: LLM, told: list[str | None]) -> None:
    for _ in range(100):
        told += [output.outputs[0].finish_reason for output in llm.generate(["b", "c"], GREEDY)]


@pytest.mark.parametrize("error", LOST)
def test_which_errors_stay(error: str) -> None:
    raised = eval(LOST[error], {"torch": torch})
    assert _lost(raised, torch.device("cpu")) == (error != "unknown")


def test_a_request_that_fails_alone_loses_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often: others' steps go well in between."""
    with LLM(max_model_len=128) as llm:
        forward, failed = Runner.forward, 0

        def poisoned(self: Any, plan: Any) -> Any:
            nonlocal failed
            if any(7 in span.token_ids.tolist() for span in plan.spans):
                failed += 1
                raise ValueError("poison")
            return forward(self, plan)

        monkeypatch.setattr(Runner, "forward", poisoned)
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        while failed <= FAILED_STEPS:
            good, bad = llm.generate([{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [5, 7]}], params)
            assert (good.outputs[0].finish_reason, bad.outputs[0].finish_reason) == ("length", "error")


def _raising(error: Exception) -> Any:
    def forward(*_: object) -> None:
        raise error

    return forward


@pytest.mark.dealt
def test_a_server_whose_device_is_lost_starts_another_engine(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading\n"
        "if 'ridgeline.serving.processes.engine_process' in ' '.join(sys.orig_argv):\n"
        + textwrap.indent(SABOTAGE.replace("ERROR", LOST["accelerator"]), "    ")
    )
    flag = tmp_path / "lost"
    environment = {"LOSE_DEVICE": str(flag), "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment.items():
            patched.setenv(name, value)
        log = (tmp_path / "log").open("w+")
        with Served("--max-model-len", "512", log=log.fileno()) as server, log:
            engine = server.engine
            body = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
            flag.touch()
            with ThreadPoolExecutor() as pool:
                answer = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=90)
                assert _until(server, 503)
                flag.unlink()
                assert answer.result().status_code == 200  # from the next one
            assert server.get("/health/ready")[0] == 200
            assert server.engine != engine
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
            log.seek(0)
            said = log.read()
    assert "the device does no work any more (AcceleratorError: CUDA error: an illegal memory access" in said
    assert "the engine ended with code 3; it is started again" in said


# ---- the socket -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    path = tmp_path_factory.mktemp("fuzz") / "socket"
    process = start_engine(path)
    yield process, path
    stop_engine(process)


def dealer(path: Path) -> zmq.Socket[bytes]:
    found = zmq.Context.instance().socket(zmq.DEALER)
    found.setsockopt(zmq.LINGER, 0)
    found.connect(f"ipc://{path}")
    return found


def garbage(draw: random.Random) -> Iterator[list[bytes]]:
    """Frames of one message, of every kind that is none of ours."""
    submit = encode(
        Submit(
            id=1, name="x", index=0, prompt_token_ids=[1], params=SamplingParams(), seed=1, max_total_tokens=4,
            stop_ids=[], eos_ids=[], cache_salt="", priority=0, arrival=0.0,
        )
    )  # fmt: skip
    for good in (submit, encode(Hello(name="f")), encode(Cancel(ids=[1])), encode(Look(name="x"))):
        yield from ([good[:end]] for end in range(len(good)))  # truncated
        for _ in range(100):
            broken = bytearray(good)
            broken[draw.randrange(len(good))] = draw.randrange(256)
            yield [bytes(broken)]
    for _ in range(300):
        yield [draw.randbytes(draw.randrange(1, 64))]
    for value in (None, 1, "hello", [], ["submit"], ["hello", 3], ["nothing", 1], {"a": 1}, ["cancel", [-1]], [[]] * 9):
        yield [msgspec.msgpack.encode(value)]
    yield [b"\x91" * 100_000]  # nested
    yield [b"\xdd\xff\xff\xff\xff"]  # a list of four thousand million
    yield from ([submit] * count for count in (2, 3, 50))  # too many frames
    yield [b"", submit]
    yield [encode(Look(name=None, limit=limit)) for limit in (-5, 2**60)]
    yield from ([encode(Look(name=None, limit=limit))] for limit in (-(2**60), 0, 2**60))


def test_no_message_on_the_socket_ends_the_engine(engine: tuple[subprocess.Popen[bytes], Path]) -> None:
    process, path = engine

    async def works() -> None:
        async with open_api_server(path) as api:
            assert await asyncio.wait_for(api.client.ask(10), 20) is not None

    asyncio.run(works())
    rude = dealer(path)
    for frames in garbage(random.Random(0)):
        rude.send_multipart(frames)
    for _ in range(20):  # not even ZeroMQ
        with sockets.socket(sockets.AF_UNIX) as raw:
            raw.connect(str(path))
            raw.sendall(random.Random(1).randbytes(4096))
    asyncio.run(works())
    assert process.poll() is None
    rude.close()


def test_a_huge_message_ends_its_connection_only(engine: tuple[subprocess.Popen[bytes], Path]) -> None:
    process, path = engine
    rude, polite = dealer(path), dealer(path)
    rude.send(bytes(LARGEST + 1))
    polite.send(encode(Hello(name="polite")))
    assert polite.poll(20_000)
    assert isinstance(decode_from_engine(polite.recv()), Welcome)
    rude.send(encode(Hello(name="rude")))  # over a new connection
    assert rude.poll(20_000)
    assert process.poll() is None
    rude.close(), polite.close()


# ---- signals --------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_an_idle_engine_that_is_stopped_is_replaced() -> None:
    with Served("--hang-timeout", "2") as server:
        stopped = server.engine
        os.kill(stopped, signal.SIGSTOP)
        assert _until(server, 503)
        assert b"no sign of life" in server.get("/health")[1]
        assert server.get("/health/live")[0] == 200
        assert _until(server, 200)
        assert stopped not in server.engines


def _until(server: Served, status: int) -> bool:
    deadline = time.monotonic() + PATIENCE
    while server.get("/health/ready")[0] != status:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_a_step_may_take_as_long_as_the_steps_before_it_make_likely() -> None:
    """A CPU that needs 0.2 s for a token may need seven minutes for a prompt, and is not taken to hang."""
    bound = StepBound(2048, 0.0)
    assert bound.bound >= 600, "nothing is known yet"
    bound.note(0.2, 1)
    assert bound.bound == pytest.approx(10 * 0.2 * 2048)
    bound.note(51.2, 512)  # prompts are cheaper, token by token
    bound.note(0.2, 1)
    assert bound.bound == pytest.approx(10 * 0.1 * 2048)
    assert StepBound(8, 120.0).bound >= 120
