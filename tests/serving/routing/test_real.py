"""The router before the real server, with OpenAI's client: it is as if the server were asked itself."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from ridgeline.core.settings.routing import RouteConfig
from tests.serving.conftest import MODEL, PATIENCE, Server
from tests.serving.routing.running import INTERVAL, RunningRouter, wait_for

MESSAGES = [{"role": "user", "content": "def fibonacci(n):"}]
ASKED = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0.0}


@pytest.fixture(scope="module")
def routed(server: Server) -> Iterator[RunningRouter]:
    running = RunningRouter(RouteConfig(worker_urls=(server.url,), health_interval=INTERVAL, access_log=False))
    wait_for(lambda: running.ready() == 1)
    yield running
    running.end()


@pytest.fixture(scope="module")
def client(routed: RunningRouter) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{routed.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


def streamed(client: openai.OpenAI) -> list[str | None]:
    chunks = client.chat.completions.create(**ASKED, stream=True)  # type: ignore[call-overload]
    return [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]


def test_answers_are_the_servers_own(client: openai.OpenAI, server: Server) -> None:
    here, there = (each.chat.completions.create(**ASKED) for each in (client, server.client))  # type: ignore[call-overload]
    assert here.choices[0].message == there.choices[0].message
    assert "".join(filter(None, streamed(client))) == here.choices[0].message.content
    assert len(streamed(client)) == len(streamed(server.client))
    assert client.models.list().data == server.client.models.list().data


def test_a_request_id_is_the_same_at_both(client: openai.OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(**ASKED, extra_headers={"x-request-id": "one-id"})  # type: ignore[call-overload]
    assert answer.headers["x-request-id"] == "one-id"
    chosen = client.chat.completions.with_raw_response.create(**ASKED, extra_body={"request_id": "bodys-own"})  # type: ignore[call-overload]
    assert chosen.headers["x-request-id"] == "bodys-own"


def test_the_servers_refusals_come_through(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(**{**ASKED, "temperature": -1.0})  # type: ignore[call-overload]


def test_stored_answers_go_on(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="def f(x):", max_output_tokens=16)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    again = client.responses.create(model=MODEL, input="more", previous_response_id=first.id, max_output_tokens=16)
    assert again.previous_response_id == first.id


def test_a_client_that_leaves_ends_its_request_in_the_engine(client: openai.OpenAI, server: Server) -> None:
    stream = client.chat.completions.create(**ASKED | {"max_tokens": 400}, stream=True)  # type: ignore[call-overload]
    next(iter(stream))
    stream.close()
    assert server.wait_idle()
