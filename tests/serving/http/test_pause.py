"""A paused engine begins no step: who waits, who ends, and what health, metrics and answers say meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.serving.conftest import PATIENCE, Server, StartServer, start_engine, stop_engine

BODY = {"prompt": list(range(5, 25)), "max_tokens": 200, "ignore_eos": True, "temperature": 0}
STEP_TIMEOUT = 1.0


@pytest.fixture(scope="module")
def own(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    socket = tmp_path_factory.mktemp("paused") / "socket"
    process = start_engine(socket, max_model_len=2048)
    with start_server(engine=socket, step_timeout=STEP_TIMEOUT) as server:
        yield server
    stop_engine(process)


@pytest.fixture
def server(own: Server) -> Iterator[Server]:
    yield own
    post(own, "/resume")
    assert own.wait_idle()


@pytest.fixture
def send(server: Server) -> Iterator[Callable[..., Future[httpx.Response]]]:
    with ThreadPoolExecutor(4) as threads:
        yield lambda **fields: threads.submit(
            httpx.post, f"{server.url}/v1/completions", json=BODY | fields, timeout=PATIENCE
        )
        post(server, "/resume")


def post(server: Server, path: str) -> dict[str, Any]:
    answer = httpx.post(server.url + path, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer.json()


def get(server: Server, path: str) -> httpx.Response:
    return httpx.get(server.url + path, timeout=PATIENCE)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def open_requests(server: Server, count: int) -> None:
    """Wait until the engine has so many requests."""
    for _ in range(int(PATIENCE / 0.02)):
        page = get(server, "/metrics").text
        lines = [
            line
            for line in page.splitlines()
            if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))
        ]
        if sum(float(line.rpartition(" ")[2]) for line in lines) == count:
            return
        time.sleep(0.02)
    pytest.fail(f"there never were {count} requests")


Send = Callable[..., Future[httpx.Response]]


def test_kept_requests_stand_still_and_end_as_if_nothing_had_been(server: Server, send: Send) -> None:
    alone = text_of(send(max_tokens=1000).result())
    going = send(max_tokens=1000, cache_salt="kept")
    open_requests(server, 1)
    assert post(server, "/pause?mode=keep")["is_paused"]
    assert not going.done()
    later = send(max_tokens=3)
    open_requests(server, 2)
    steps = server.api.client.stats
    assert steps is not None
    time.sleep(STEP_TIMEOUT + 1.2)  # longer than a step may take, and than the engine is silent
    now = server.api.client.stats
    assert now is not None
    assert (now.steps, now.paused) == (steps.steps, True)
    assert not going.done()
    assert not later.done()
    assert get(server, "/is_paused").json() == {"is_paused": True}
    assert (get(server, "/health").status_code, get(server, "/health").json()["paused"]) == (200, True)
    ready = get(server, "/health/ready")
    assert (ready.status_code, "paused" in ready.json()["reason"]) == (503, True)
    assert "ridgeline:engine_paused{" in (page := get(server, "/metrics").text)
    assert [line[-3:] for line in page.splitlines() if line.startswith("ridgeline:engine_paused{")] == ["1.0"]
    assert not post(server, "/resume")["is_paused"]
    assert get(server, "/health/ready").status_code == 200, "the time of the pause is no step's"
    assert text_of(going.result()) == alone
    assert text_of(later.result()) == alone[: len(text_of(later.result()))]
    assert get(server, "/is_paused").json() == {"is_paused": False}


def test_aborted_requests_say_why_and_later_ones_wait(server: Server, send: Send) -> None:
    going = send(max_tokens=1500, cache_salt="aborted")
    open_requests(server, 1)
    assert post(server, "/pause")["is_paused"]
    answer = going.result()
    assert (answer.status_code, "paused" in answer.json()["error"]["message"]) == (503, True)
    assert "retry-after" in answer.headers
    later = send(max_tokens=2)
    open_requests(server, 1)
    assert not later.done()
    post(server, "/resume")
    assert text_of(later.result())


def test_requests_under_way_end_before_a_pause_that_waits(server: Server, send: Send) -> None:
    going = send(max_tokens=1000, cache_salt="drained")
    open_requests(server, 1)
    assert post(server, "/pause?mode=wait")["is_paused"]
    assert len(going.result(timeout=5).json()["choices"]) == 1
    later = send(max_tokens=2)
    open_requests(server, 1)
    assert not later.done()
    post(server, "/resume")
    assert text_of(later.result())


@pytest.mark.parametrize("query", ["mode=never", "clear_cache=true"])
def test_a_wrong_order_changes_nothing(server: Server, query: str) -> None:
    answer = httpx.post(f"{server.url}/pause?{query}", timeout=PATIENCE)
    assert (answer.status_code, query.split("=")[0] in answer.json()["error"]["message"]) == (400, True)
    assert get(server, "/is_paused").json() == {"is_paused": False}
