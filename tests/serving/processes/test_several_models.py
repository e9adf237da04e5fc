"""A server with two models, which have the devices in turn: real processes, as users start them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ridgeline import LLM, SamplingParams
from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline_bench.scripts.served import Served
from tests.serving.conftest import PATIENCE

FOLDERS = {"large": EMBEDDED_MODEL, "small": EMBEDDED_MODEL.with_name("embedded-draft")}
PROMPTS = ["def add(a, b):", "class Stack:"]
LONG = 100  # tokens, which take several turns


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    models = [f"{name}={folder}" for name, folder in FOLDERS.items()]
    with Served(
        *models, "--model-turn", "0.25", "--open-admin-routes", "--dtype", "float32", "--device", "cpu"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, str]]:
    """What each model writes by itself."""
    found = {}
    for name, folder in FOLDERS.items():
        with LLM(folder, dtype="float32", device="cpu") as llm:
            params = SamplingParams(temperature=0, max_tokens=LONG, ignore_eos=True)
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            found[name] = dict(zip(PROMPTS, (output.outputs[0].text for output in outputs), strict=True))
    return found


def client(server: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


async def write(asked: openai.AsyncOpenAI, model: str, prompt: str, max_tokens: int) -> str:
    pieces = await asked.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return "".join([piece.choices[0].text async for piece in pieces])


def send(server: Served, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_each_model_writes_what_it_writes_alone(server: Served, alone: dict[str, dict[str, str]]) -> None:
    """Streams of both models at once: those under way stand still while the other model has its turn."""

    async def main() -> None:
        asked = client(server)
        wanted = [(model, prompt) for prompt in PROMPTS for model in FOLDERS]
        found = await asyncio.gather(*(write(asked, model, prompt, LONG) for model, prompt in wanted))
        assert found == [alone[model][prompt] for model, prompt in wanted]

    asyncio.run(main())


@pytest.mark.dealt
def test_a_busy_model_does_not_keep_the_devices(server: Served, alone: dict[str, dict[str, str]]) -> None:
    async def main() -> None:
        asked, over = client(server), False

        async def busy(prompt: str) -> None:
            while not over:
                assert await write(asked, "large", prompt, LONG) == alone["large"][prompt]

        running = [asyncio.create_task(busy(prompt)) for prompt in PROMPTS]
        for _ in range(3):
            await asyncio.sleep(0.3)
            began = time.monotonic()
            assert await write(asked, "small", PROMPTS[0], 20)
            assert time.monotonic() - began < PATIENCE / 4, "one turn, and not as long as requests come"
        over = True
        await asyncio.gather(*running)

    asyncio.run(main())


def test_requests_find_their_model_by_body_path_and_query(server: Served) -> None:
    assert [card["id"] for card in send(server, "/v1/models")[1]["data"]] == ["large", "small"]
    assert send(server, "/v1/models/small")[1]["id"] == "small"
    shown = {
        name: send(server, "/api/show", {"model": name})[1]["model_info"] for name in ("large", "small", "small:latest")
    }
    assert shown["small:latest"] == shown["small"] != shown["large"], "as Ollama's clients write a name"
    assert send(server, "/api/show", {"name": "small"})[1]["model_info"] == shown["small"], "the older word"
    assert send(server, "/server_info?model=small:latest")[1]["names"] == ["small"]
    assert [tag["name"] for tag in send(server, "/api/tags")[1]["models"]] == ["large", "small"]
    status, error = send(server, "/v1/completions", {"model": "other", "prompt": "x"})
    assert (status, error["error"]["code"]) == (404, "model_not_found")
    assert "large, small" in error["error"]["message"]
    assert send(server, "/v1/completions", {"prompt": "x", "max_tokens": 1})[1]["model"] == "large", "the first"
    for model in FOLDERS:
        body = {"text_input": "x", "parameters": {"max_tokens": 2}}
        assert send(server, f"/v2/models/{model}/generate", body)[1]["model_name"] == model
        assert send(server, f"/server_info?model={model}")[1]["names"] == [model]
        asked: dict[str, Any] = {"model": model, "input": "x", "max_output_tokens": 2}
        _, answer = send(server, "/v1/responses", asked)
        assert send(server, f"/v1/responses/{answer['id']}")[1]["model"] == model, "answers are kept together"
    status, _ = send(server, "/v1/completions", {"model": ["small"], "prompt": "x"})
    assert status == 400


def test_an_engines_routes_are_those_of_the_model_in_the_query(server: Served) -> None:
    assert send(server, "/v1/completions", {"model": "small", "prompt": "x", "max_tokens": 1})[0] == 200
    status, told = send(server, "/reload_weights?model=large", {})
    assert (status, told["error"]["message"]) == (
        409,
        "the engine is asleep; send it a request, and reload it then.",
    ), "nobody can wake it up by an order"
    assert send(server, "/v1/completions", {"model": "large", "prompt": "x", "max_tokens": 1})[0] == 200
    status, told = send(server, "/reload_weights?model=large", {})
    assert (status, told.get("status")) == (200, "reloaded")
    for path in ("/reload_weights", "/reset_prefix_cache", "/sleep"):
        status, error = send(server, f"{path}?model=other", {})
        assert (status, error["error"]["code"]) == (404, "model_not_found")
        assert "large, small" in error["error"]["message"]
    assert send(server, "/server_info?model=other")[0] == 404
    assert send(server, "/sleep?model=small", {})[0] == 409


def test_metrics_and_health_are_of_all_models(server: Served) -> None:
    page = server.get("/metrics")[1].decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert {sample.labels["model_name"] for sample in families["vllm:num_requests_running"].samples} == set(FOLDERS)
    awake = [s for s in families["vllm:engine_sleep_state"].samples if s.labels["sleep_state"] == "awake"]
    assert len(awake) == len(FOLDERS)
    assert sum(sample.value for sample in awake) <= 1
    assert server.get("/health/ready")[0] == server.get("/health")[0] == 200


@pytest.mark.thorough
def test_a_stuck_engine_that_has_the_devices_gives_them_up_and_comes_back(server: Served) -> None:
    """Who sleeps could not be woken up while it has them."""
    asyncio.run(write(client(server), "small", "x", 4))
    stuck = send(server, "/server_info?model=small")[1]["engine"]["process_id"]
    os.kill(stuck, signal.SIGSTOP)
    asyncio.run(until_answered(client(server), "large"))
    assert stuck not in server.engines
    asyncio.run(until_answered(client(server), "small"))


async def until_answered(asked: openai.AsyncOpenAI, model: str) -> None:
    """Send a request until it has an answer."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                await write(asked, model, "x", 4)
                return
            except (openai.APIError, openai.APIStatusError):
                await asyncio.sleep(0.1)


def test_nobody_else_says_who_sleeps(server: Served) -> None:
    for order in ("pause", "sleep", "wake_up", "resume"):
        status, error = send(server, f"/{order}", {})
        assert (status, error["error"]["code"]) == (409, "order_not_obeyed")


@pytest.mark.dealt
def test_a_dead_engine_comes_back_and_the_others_go_on(server: Served) -> None:
    async def main() -> None:
        asked = client(server)

        for victim in (0, 1):
            await write(asked, "small", "x", 4)  # the other sleeps
            os.kill(server.engines[victim], signal.SIGKILL)
            await asyncio.gather(*(until_answered(asked, model) for model in FOLDERS))

    asyncio.run(main())
    assert len(server.engines) == 2


def test_it_ends_when_it_is_asked_to(server: Served) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 0
