"""Where a request's time went, against clocks outside the server; who is told; and what is forgotten."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.request import RequestStats, SamplingParams
from ridgeline.kernels.base.cost import Headroom
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.app import create_app
from ridgeline.serving.errors import Unavailable
from ridgeline.serving.generation.service import GenerationRequest
from ridgeline.serving.http import operator
from ridgeline.serving.http.middleware import wrap
from ridgeline.serving.observed import recent
from ridgeline.serving.observed.breakdown import figures
from ridgeline.serving.observed.recent import RecentRequests
from ridgeline.transport.messages import Look, Submit
from tests.serving.conftest import PATIENCE, Server, StartServer, open_api_server, start_engine, stop_engine

TOKENS = list(range(5, 45))
BODY = {"prompt": TOKENS, "max_tokens": 40, "ignore_eos": True, "temperature": 0}


def complete(server: Server, name: str, **fields: object) -> dict[str, Any]:
    answer = httpx.post(
        f"{server.url}/v1/completions", json=BODY | fields, headers={"x-request-id": name}, timeout=PATIENCE
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def look(server: Server, name: str) -> dict[str, Any]:
    answer = httpx.get(f"{server.url}/v1/requests/{name}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_parts_of_a_request_add_up_to_the_time_its_client_waited(server: Server) -> None:
    salted = {"cache_salt": "parts"}
    complete(server, "parts-first", **salted)
    began, at = time.monotonic(), time.time()
    answer = complete(server, "parts", **salted)
    waited = time.monotonic() - began
    found = look(server, "parts")
    assert (found["id"], found["prompt_tokens"]) == ("parts", 40)
    assert at <= found["created"] <= at + waited
    [part] = found["completions"]
    assert (part["index"], part["finish_reason"], part["output_tokens"]) == (0, "length", 40)
    assert part["cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 39
    assert min(part["queue"], part["prefill"], part["decode"], part["host_gaps"]) >= 0
    assert part["queue"] + part["prefill"] + part["decode"] == pytest.approx(part["total"], abs=1e-9)
    assert part["device"] + part["host_gaps"] == pytest.approx(part["prefill"] + part["decode"], rel=0.05)
    assert part["total"] <= waited
    assert part["total"] > 0.1 * waited, "the rest is HTTP and JSON, and what else the machine does"
    assert part["headroom"] is None, "nothing is known of this CPU's limit"


def test_the_answer_itself_has_the_same_breakdown(server: Server) -> None:
    told = complete(server, "told", include_breakdown=True)["ridgeline"]
    found = look(server, "told")
    assert found.pop("created") == pytest.approx(time.time(), abs=60)
    assert found == told


def test_a_running_request_shows_its_figures_so_far(server: Server) -> None:
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json=BODY | {"max_tokens": 1500, "stream": True, "cache_salt": "so far"},
        headers={"x-request-id": "so-far"},
        timeout=PATIENCE,
    ) as stream:
        lines = stream.iter_lines()
        got = sum(1 for _ in zip(range(20), (line for line in lines if line), strict=False))
        begun = time.monotonic()
        [early] = look(server, "so-far")["completions"]
        seen = time.monotonic()
        time.sleep(0.2)
        again = time.monotonic()
        [late] = look(server, "so-far")["completions"]
        ended = time.monotonic()
    assert (early["finish_reason"], late["finish_reason"]) == (None, None)
    assert got <= early["output_tokens"] < late["output_tokens"] < 1500
    assert (early["queue"], early["prefill"]) == (late["queue"], late["prefill"])
    assert again - seen <= late["total"] - early["total"] <= ended - begun
    assert late["queue"] + late["prefill"] + late["decode"] == pytest.approx(late["total"])
    assert 0 < early["device"] < late["device"] <= late["total"]
    assert server.wait_idle()
    [last] = look(server, "so-far")["completions"]
    assert (last["finish_reason"], last["output_tokens"] < 1500) == ("abort", True), "its client left"


def test_each_completion_and_each_prompt_has_its_own(server: Server) -> None:
    complete(server, "twins", n=2, temperature=1, max_tokens=5)
    complete(server, "lists", prompt=[TOKENS, TOKENS[:9]], max_tokens=5)
    listed = httpx.get(f"{server.url}/v1/requests", params={"limit": 3}).json()["data"]
    assert [entry["prompt_tokens"] for entry in listed] == [9, 40, 40] or listed[0]["prompt_tokens"] == 40
    twins = look(server, "twins")
    assert [part["index"] for part in twins["completions"]] == [0, 1]
    assert {entry["id"].startswith("lists") for entry in listed[:2]} == {True}
    assert len({entry["id"] for entry in listed}) == 3
    assert listed[2] == twins


def test_a_stop_string_counts_what_the_client_got(server: Server) -> None:
    text = complete(server, "whole", max_tokens=30)["choices"][0]["text"]
    stop = text[len(text) // 2 :][:6]
    answer = complete(server, "stopped", max_tokens=1500, stop=[stop])  # so long that it cannot end before
    assert answer["choices"][0]["finish_reason"] == "stop"
    [part] = look(server, "stopped")["completions"]
    assert part["finish_reason"] == "stop"
    assert part["output_tokens"] == answer["usage"]["completion_tokens"] < 30


def test_what_is_not_known_is_said_in_one_sentence(server: Server) -> None:
    answer = httpx.get(f"{server.url}/v1/requests/nobody")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "request_not_found", "request_id")
    assert "'nobody'" in error["message"]
    for wrong in ("0", "-1", "x", "100000", "1e3", ""):
        answer = httpx.get(f"{server.url}/v1/requests", params={"limit": wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit"), wrong


def counter(server: Server, name: str) -> float:
    page = httpx.get(f"{server.url}/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(f"vllm:{name}_total{{"))


def test_a_reset_cache_finds_nothing_of_before_and_goes_on_counting(server: Server) -> None:
    def cached() -> int:
        return int(complete(server, "forgotten", cache_salt="x")["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() == 39
    hits = counter(server, "prefix_cache_hits")
    assert hits >= 39
    answer = httpx.post(f"{server.url}/reset_prefix_cache", timeout=PATIENCE)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert cached() == 0
    assert counter(server, "prefix_cache_hits") == hits
    assert cached() == 39


def test_the_cache_in_figures(server: Server) -> None:
    complete(server, "census", cache_salt="census")
    (cache,) = httpx.get(f"{server.url}/kv", timeout=PATIENCE).json()["caches"]
    told = CliRunner().invoke(app, ["kv", "--url", server.url], catch_exceptions=False).stdout
    assert sum(cache["depths"]) == cache["sampled"] <= cache["nodes"]
    assert cache["nodes"] >= 40 // cache["block_size"]
    assert sum(group["kept"] for group in cache["groups"]) >= cache["nodes"] > 0
    assert f"prefix tree: {cache['nodes']} blocks" in told
    with pytest.raises(InvalidConfig, match="answered 404"):
        CliRunner().invoke(app, ["kv", "--url", f"{server.url}/nowhere"], catch_exceptions=False)


def test_a_cache_is_reset_while_requests_run(server: Server) -> None:
    with httpx.stream("POST", f"{server.url}/v1/completions", json=BODY | {"stream": True}, timeout=PATIENCE) as told:
        lines = told.iter_lines()
        began = next(lines)
        assert httpx.post(f"{server.url}/reset_prefix_cache", timeout=PATIENCE).status_code == 200
        text = "".join(
            json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            for line in (began, *lines)
            if line.startswith("data: {")
        )
    assert text == complete(server, "alone")["choices"][0]["text"]


def test_settings_are_shown_without_what_is_secret(start_server: StartServer) -> None:
    with start_server(api_key=("one",), admin_key=("two",), max_queue_requests=77) as running:
        found = httpx.get(f"{running.url}/server_info", headers={"authorization": "Bearer two"})
        told = found.json()
        assert told["config"]["max_queue_requests"] == 77
        assert told["engine"]["dtype"] == "float32"
        assert not {"api_key", "admin_key", "ssl_keyfile_password"} & told["config"].keys()
        assert '"one"' not in found.text
        assert '"two"' not in found.text


def test_every_api_server_tells_of_every_request(server: Server, start_server: StartServer) -> None:
    """Two API servers, one engine: figures and requests are the same whichever answers."""
    with start_server(api_server_count=2) as other:
        complete(server, "from-one")
        complete(other, "from-two")
        for name in ("from-one", "from-two"):
            assert look(server, name) == look(other, name)

        def counted(api: Server) -> list[str]:
            lines = httpx.get(f"{api.url}/metrics").text.splitlines()
            return [line for line in lines if line.startswith("vllm:") or line.startswith("ridgeline:step")]

        assert counted(server) == counted(other)
        assert len(counted(server)) > 100
        page, twin = (httpx.get(f"{api.url}/dashboard/data").json() for api in (server, other))
        assert page["requests"] == twin["requests"]


# ---- what is kept ---------------------------------------------------------------------------------------------------


def submit(name: str, index: int = 0) -> Submit:
    return Submit(
        id=0,
        name=name,
        index=index,
        prompt_token_ids=[1],
        params=SamplingParams(),
        seed=0,
        max_total_tokens=2,
        stop_ids=[],
        eos_ids=[],
        cache_salt="",
        priority=0,
        arrival=0.0,
    )


def stats(**fields: float | None) -> RequestStats:
    times = {"arrival": 10.0, "first_scheduled": 11.0, "first_token": 13.0, "finished": 17.0} | fields
    return RequestStats(**times, prompt_tokens=1, cached_tokens=0, output_tokens=2)  # type: ignore[arg-type]


def names(book: RecentRequests) -> list[str]:
    lives = book.look(Look(limit=10**6), lambda name: (stats(), Headroom()))
    return [f"{life.name}/{life.index}/{life.finish_reason}" for life in lives]


def test_only_the_newest_are_kept_whatever_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "KEPT", 4)
    book = RecentRequests()
    for number in range(50):
        book.begin(f"e{number}", submit(f"r{number}"))
    assert names(book) == ["r49/0/None", "r48/0/None", "r47/0/None", "r46/0/None"]
    for number in range(50):
        book.end(f"e{number}", "length", stats(), Headroom())
    assert names(book)[0] == "r49/0/length"
    for index in range(3):
        book.begin(f"n{index}", submit("many", index))
    assert names(book) == ["many/0/None", "many/1/None", "many/2/None", "r49/0/length"]
    assert len(book._running) == 3, "nothing is held of what was forgotten"


def test_the_newest_request_of_a_name_has_it_and_the_end_of_an_older_one_is_not_its_own() -> None:
    book = RecentRequests()
    book.begin("old", submit("same"))
    book.begin("new", submit("same"))
    book.end("old", "abort", stats(), Headroom())
    assert names(book) == ["same/0/None"]
    book.end("new", "stop", stats(), Headroom())
    assert names(book) == ["same/0/stop"]


def test_parts_of_a_life_known_by_heart() -> None:
    part = figures(stats(), Headroom(elapsed=4.0, limit=3.0))
    assert (part["queue"], part["prefill"], part["decode"], part["total"]) == (1.0, 2.0, 4.0, 7.0)
    assert (part["device"], part["host_gaps"], part["headroom"]) == (4.0, 2.0, 0.75)
    waiting = figures(stats(first_scheduled=None, first_token=None), Headroom())
    assert (waiting["queue"], waiting["prefill"], waiting["decode"], waiting["host_gaps"]) == (7.0, None, None, None)
    reading = figures(stats(first_token=None), Headroom(elapsed=1.0))
    assert (reading["queue"], reading["prefill"], reading["decode"], reading["total"]) == (1.0, 6.0, None, 7.0)


# ---- an engine that stands still -----------------------------------------------------------------------------------


@pytest.fixture
def own_engine(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """Socket and process id of an engine that no other test uses."""
    process = start_engine(tmp_path / "engine")
    yield tmp_path / "engine", process.pid
    stop_engine(process)


def test_health_tells_of_an_engine_that_was_given_up(own_engine: tuple[Path, int]) -> None:
    """The engine's process is stopped as a hung device would stop it: it lives, and says nothing."""
    path, pid = own_engine

    async def main() -> None:
        async with open_api_server(path) as api, open_api_server(path) as other:
            running = asyncio.create_task(generate(api, 1800))
            while not any(ticket.submit is None for ticket in api.client.engines[0]._tickets.values()):
                await asyncio.sleep(0.05)  # until a token has come
            os.kill(pid, signal.SIGSTOP)
            assert await health(api) == (200, None), "who says that it hangs is the supervisor"
            api.client.give_up(pid, "has given no sign of life for 10 s")
            told = "the engine has given no sign of life for 10 s, "
            with pytest.raises(Unavailable, match=told):
                await running
            assert await until(api, 503) == f"{told}and is replaced"
            assert not (await operator.figures(api, 0.0, 0.0))["healthy"]
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(1.0)
            assert (await health(api))[0] == 503, "what it says afterwards is not heard"
            assert await health(other) == (200, None)

            os.kill(pid, signal.SIGKILL)
            assert await until(other, 503) in ("the engine is about to end", "the engine is not running")
            while (page := await operator.figures(other, 0.0, 0.0))["up"]:
                await asyncio.sleep(0.02)
            assert page["requests"] is None
            assert await health(other) == (503, "the engine is not running")

    asyncio.run(main())


async def generate(api: ApiServer, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    async with api.service.run(GenerationRequest(id="long", prompt_token_ids=[7] * 8, params=params)) as run:
        await run.finish()


async def until(api: ApiServer, status: int) -> str | None:
    """The reason it gives, once it has this status."""
    async with asyncio.timeout(PATIENCE):
        while (found := await health(api))[0] != status:
            await asyncio.sleep(0.02)
    return found[1]


APPS: dict[int, tuple[ApiServer, Any]] = {}


async def health(api: ApiServer) -> tuple[int, str | None]:
    """Status and reason, as a probe gets them, which has no key."""
    if id(api) not in APPS:  # they take long to make on a busy machine, and no loop listens to engines meanwhile
        APPS[id(api)] = api, wrap(create_app(api), api)
    transport = httpx.ASGITransport(app=APPS[id(api)][1])
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.get("/health")
        alive = await client.get("/health/live")
        assert alive.status_code == 200, "the API server itself is well"
        return answer.status_code, answer.json().get("reason")
