"""The Ray Serve application on a real Ray, with real clients. Left out where Ray is not installed."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import openai
import pytest

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

from deploy.ray_serve import application  # noqa: E402
from ridgeline.core.errors import InvalidConfig  # noqa: E402


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        given = {"gpus": "0", "cpus": "0.5", "max_model_len": "512", "api_key": "secret", "served_model_name": "tiny"}
        serve.run(application(given))
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        serve.shutdown()
        ray.shutdown()


def test_clients_see_our_server(url: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="secret")
    (model,) = client.models.list().data
    assert (model.id, model.model_dump()["max_model_len"]) == ("tiny", 512)
    pieces = list(
        client.completions.create(
            model="tiny",
            prompt="def f(",
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == 8
    whole = client.completions.create(model="tiny", prompt="def f(", max_tokens=8, temperature=0)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices).startswith(whole.choices[0].text)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="x", temperature=-1)


def test_a_client_that_leaves_frees_its_place(url: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="secret")
    stream = client.completions.create(
        model="tiny", prompt="x", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    until = time.monotonic() + 120
    while " 0.0" not in _line(client, "vllm:num_requests_running{"):
        assert time.monotonic() < until
        time.sleep(0.2)
    assert _line(client, 'vllm:request_success_total{engine="0",finished_reason="abort"').endswith(" 1.0")


def _line(client: openai.OpenAI, beginning: str) -> str:
    text = client.with_options(base_url=str(client.base_url).replace("/v1/", "")).get("/metrics", cast_to=str)
    return next((line for line in text.splitlines() if line.startswith(beginning)), "")


def test_settings_that_do_not_exist_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="prot"):
        application({"prot": "1"})
    with pytest.raises(InvalidConfig, match="max_model_len"):
        application({"max_model_len": "none"})
