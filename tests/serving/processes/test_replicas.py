"""One server with two engines: who gets which request, and what the others notice when one is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

import ridgeline_bench.scripts.serving_endurance as endurance
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.serving import ServeConfig
from ridgeline.serving.grpc.proto.ridgeline.v1 import inference_pb2 as pb
from ridgeline.serving.grpc.proto.ridgeline.v1 import inference_pb2_grpc
from ridgeline.serving.processes import placement
from ridgeline_bench.scripts.served import Served
from tests.serving.conftest import PATIENCE

ENGINES = ("0", "1")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    options = ["-dp", "2", "--device", "cpu", "--max-model-len", "1024", "--grpc-port", "0"]
    with tempfile.TemporaryFile("w+") as log, Served(*options, log=log.fileno()) as server:
        assert not down(server), "ready says that both engines are there"
        log.seek(0)
        said = log.read()
        assert all(f"[engine {engine}] " in said for engine in ENGINES)
        yield server


def wait_until(holds: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def down(server: Served) -> list[str]:
    """Engines that do not work, as the server says; it must be ready all the same."""
    status, answer = server.get("/health/ready")
    assert status == 200, answer
    said = json.loads(answer)
    return [reason.split(":")[0].removeprefix("engine ") for reason in said.get("down", [])]


def metric(server: Served, name: str, engine: str) -> float:
    lines = server.get("/metrics")[1].decode().splitlines()
    mine = [line for line in lines if line.startswith(f"{name}{{") and f'engine="{engine}"' in line]
    assert mine, name
    return sum(float(line.rsplit(" ", 1)[1]) for line in mine)


def each(server: Served, name: str) -> list[float]:
    return [metric(server, name, engine) for engine in ENGINES]


def complete(server: Served, prompt: list[int], max_tokens: int = 4, **more: Any) -> dict[str, Any]:
    content = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(content).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        told: dict[str, Any] = json.load(answer) | {"request": answer.headers["x-request-id"]}
    return told


def test_streams_that_come_soon_after_it_is_ready_are_spread(served: Served) -> None:
    """The first test of this server, whose second engine is there a while later than the first one."""

    async def four() -> None:
        client = endurance.load(served.url)
        running = await endurance.begin(client, [endurance.body(120, prompt=[number + 3] * 40) for number in range(4)])
        assert all(outcome.complete for outcome in await asyncio.gather(*running))
        client.close()

    asyncio.run(four())
    assert each(served, "vllm:request_success_total") == [2, 2]


def test_both_engines_work_and_each_conversation_returns_to_its_own(served: Served) -> None:
    """Three conversations, turn after turn: taking engines in turn would send each one elsewhere the second time."""
    conversations = [[100 * number + i for i in range(96)] for number in range(1, 4)]
    before = each(served, "vllm:request_success_total")
    for turn in range(3):
        for conversation in conversations:
            told = complete(served, conversation, return_token_ids=True)
            cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == 0 if turn == 0 else cached >= 96
            conversation += [*told["choices"][0]["token_ids"], *range(5, 45)]
    after = each(served, "vllm:request_success_total")
    assert sorted(now - then for now, then in zip(after, before, strict=True)) == [3, 6]


def test_a_request_is_found_wherever_it_ran_and_the_dashboard_adds_up(served: Served) -> None:
    names = [complete(served, [number] * 40)["request"] for number in range(50, 54)]
    for name in names:
        status, answer = served.get(f"/v1/requests/{name}")
        assert status == 200
        assert json.loads(answer)["id"] == name
    newest = json.loads(served.get("/v1/requests?limit=4")[1])["data"]
    assert [told["id"] for told in newest] == names[::-1]
    wait_until(lambda: shown_tokens(served) == sum(each(served, "vllm:generation_tokens_total")))


def test_grpc_reaches_both_engines_and_each_metric_is_told_once(served: Served) -> None:
    before = each(served, "vllm:request_success_total")
    with grpc.insecure_channel(served.said.strip().rsplit("grpc://", 1)[1]) as channel:
        for number in range(4):
            asked = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[number + 300] * 40), sampling=pb.Sampling(max_tokens=2)
            )
            assert list(inference_pb2_grpc.InferenceStub(channel).Generate(asked, timeout=PATIENCE))
    assert [now - then for now, then in zip(each(served, "vllm:request_success_total"), before, strict=True)] == [2, 2]
    lines = [line.rsplit(" ", 1)[0] for line in served.get("/metrics")[1].decode().splitlines()]
    samples = [line for line in lines if not line.startswith("#")]
    assert len(samples) == len(set(samples))


def shown_tokens(server: Served) -> float:
    figures: dict[str, Any] = json.loads(server.get("/dashboard/data")[1])["figures"]
    return float(figures["counters"]["generation_tokens"])


@pytest.mark.dealt
def test_the_death_of_one_engine_is_its_own_requests_business(served: Served) -> None:
    victim_pid = served.engines[0]

    async def kill() -> str:
        client = endurance.load(served.url)
        running = await endurance.begin(client, [endurance.body(200, prompt=[number + 9] * 40) for number in range(12)])
        shares = await asyncio.to_thread(each, served, "vllm:num_requests_running")
        assert sorted(shares) == [6, 6]
        os.kill(victim_pid, signal.SIGKILL)
        while not (found := await asyncio.to_thread(down, served)):
            pass
        # from now on everything goes to the other
        told = await asyncio.gather(*(endurance.ask(client, endurance.body(4, prompt=[n] * 40)) for n in range(8)))
        assert all(outcome.complete for outcome in told), [outcome.error for outcome in told]
        outcomes = await asyncio.gather(*running)
        lost = [outcome for outcome in outcomes if not outcome.complete]
        assert 0 < len(lost) <= 6  # who had no token yet goes to the next one
        assert all("the engine died" in str(outcome.stream.failure) for outcome in lost)
        client.close()
        return found[0]

    victim = asyncio.run(kill())
    wait_until(lambda: not down(served))
    assert metric(served, "ridgeline:engine_restarts_total", victim) == 1
    assert sum(each(served, "ridgeline:engine_restarts_total")) == 1
    for number in range(4):
        complete(served, [number + 200] * 40)
    assert metric(served, "vllm:request_success_total", victim) > 0
    assert victim_pid not in served.engines


@pytest.mark.thorough
def test_sigterm_lets_the_requests_of_both_engines_end(served: Served) -> None:
    """The last test of this server: it ends here."""
    children = [*served.engines, *served.api_servers]
    assert len(children) == 3
    asyncio.run(endurance.drain(served, count=8, tokens=200, after=0.0))
    assert all(not os.path.exists(f"/proc/{child}") for child in children)


# ---- devices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "visible", "options", "expected"),
    [
        (2, None, {}, ["0", "1"]),
        (4, None, {"tensor_parallel_size": 2}, ["0,1", "2,3"]),
        (2, "3,GPU-7", {"device": "cuda"}, ["3", "GPU-7"]),
    ],
)
def test_each_engine_sees_gpus_of_its_own(
    gpus: int, visible: str | None, options: dict[str, object], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "visible_gpus", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = placement.environments(ServeConfig(data_parallel_size=2, engine=options))
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in found] == expected


def test_engines_on_a_cpu_share_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = placement.environments(
        ServeConfig(data_parallel_size=3, engine={"device": "cpu", "tensor_parallel_size": 2})
    )
    assert [environment["OMP_NUM_THREADS"] for environment in found] == ["2"] * 3


@pytest.mark.parametrize(
    ("gpus", "options", "said"),
    [
        (1, {}, "data_parallel_size is 2, and torch sees 1 GPUs; lower it to 1."),
        (3, {"tensor_parallel_size": 2}, "data_parallel_size is 2 of 2 GPUs each, and torch sees 3 GPUs"),
        (1, {"tensor_parallel_size": 2}, "tensor_parallel_size is 2, and torch sees 1 GPUs; lower it to 1."),
        (0, {"device": "cuda"}, "device cuda was asked for, but torch sees no GPU; use cpu."),
        (2, {"device": "cuda:1"}, "device cuda:1 is one GPU, and data_parallel_size is 2; use device cuda."),
    ],
)
def test_too_few_gpus_are_told_in_one_sentence(
    gpus: int, options: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "visible_gpus", lambda: gpus)
    with pytest.raises(InvalidConfig) as error:
        placement.environments(ServeConfig(data_parallel_size=2, engine=options))
    assert said in str(error.value)
