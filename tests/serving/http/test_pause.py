"""A paused engine begins no step: who waits, who ends, and what health, metrics and answers say meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from ridgeline.assembly import assemble
from ridgeline.core.settings.config import LLMConfig
from ridgeline.serving.apis.grpc.health import ready as grpc_ready
from ridgeline.serving.processes import loaded
from ridgeline.serving.processes.engine_host import EngineHost
from ridgeline.serving.processes.engine_settings import EngineSettings
from ridgeline.transport.messages import Standing
from ridgeline.transport.zmq import EngineSocket
from ridgeline.weights.folder import EMBEDDED_MODEL
from tests.serving.conftest import DTYPE, MODEL, PATIENCE, Server, StartServer, start_engine, stop_engine

BODY = {"prompt": list(range(5, 25)), "max_tokens": 150, "ignore_eos": True, "temperature": 0}
KEY = "an-operators-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def own(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    socket = tmp_path_factory.mktemp("paused") / "socket"
    process = start_engine(socket, max_model_len=2048)
    with start_server(engine=socket, admin_key=(KEY,)) as server:
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
    answer = httpx.post(server.url + path, headers=HEADERS, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer.json()


def get(server: Server, path: str) -> httpx.Response:
    return httpx.get(server.url + path, headers=HEADERS, timeout=PATIENCE)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


@pytest.fixture(scope="module")
def undisturbed(own: Server) -> str:
    """What `BODY` becomes where nothing happens meanwhile."""
    return text_of(httpx.post(f"{own.url}/v1/completions", json=BODY, timeout=PATIENCE))


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


def test_kept_requests_stand_still_and_end_as_if_nothing_had_been(server: Server, send: Send, undisturbed: str) -> None:
    going = send(cache_salt="kept")
    open_requests(server, 1)
    assert post(server, "/pause?mode=keep")["is_paused"]
    assert not going.done()
    later = send(max_tokens=3)
    open_requests(server, 2)
    steps = server.api.client.stats
    assert steps is not None
    time.sleep(1.2)  # longer than the engine is silent
    now = server.api.client.stats
    assert now is not None
    assert (now.steps, now.paused) == (steps.steps, True)
    assert not going.done()
    assert not later.done()
    assert get(server, "/is_paused").json() == {"is_paused": True}
    assert (get(server, "/health").status_code, get(server, "/health").json()["paused"]) == (200, True)
    ready = get(server, "/health/ready")
    assert (ready.status_code, "paused" in ready.json()["reason"]) == (503, True)
    for path in ("/v2/health/ready", f"/v2/models/{MODEL}/ready"):
        assert (get(server, path).status_code, "paused" in get(server, path).json()["error"]) == (503, True)
    assert not grpc_ready(server.api)
    assert "ridgeline:engine_paused{" in (page := get(server, "/metrics").text)
    assert [line[-3:] for line in page.splitlines() if line.startswith("ridgeline:engine_paused{")] == ["1.0"]
    assert not post(server, "/resume")["is_paused"]
    assert get(server, "/health/ready").status_code == 200
    assert text_of(going.result()) == undisturbed
    assert text_of(later.result()) == undisturbed[: len(text_of(later.result()))]
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


@pytest.mark.dealt
def test_requests_under_way_end_before_a_pause_that_waits(server: Server, send: Send) -> None:
    going = send(cache_salt="drained")
    open_requests(server, 1)
    assert post(server, "/pause?mode=wait")["is_paused"]
    assert len(going.result().json()["choices"]) == 1
    later = send(max_tokens=2)
    open_requests(server, 1)
    assert not later.done()
    post(server, "/resume")
    assert text_of(later.result())


@pytest.mark.thorough
def test_who_waits_behind_a_pause_that_is_overtaken_goes_on(server: Server, send: Send) -> None:
    """A resume that comes while requests still drain: those that were held back for the pause run now."""
    going = send(max_tokens=1000, cache_salt="overtaken")
    open_requests(server, 1)
    with ThreadPoolExecutor(1) as threads:
        pause = threads.submit(httpx.post, f"{server.url}/pause?mode=wait", headers=HEADERS, timeout=PATIENCE)
        orders_under_way(server, 1)
        later = send(max_tokens=2)
        open_requests(server, 2)
        assert not later.done()
        assert not post(server, "/resume")["is_paused"]
        overtaken = pause.result()
    assert (overtaken.status_code, "before it had paused" in overtaken.json()["error"]["message"]) == (409, True)
    assert text_of(later.result())
    assert text_of(going.result())


@pytest.mark.parametrize("query", ["mode=never", "clear_cache=true"])
def test_a_wrong_order_changes_nothing(server: Server, query: str) -> None:
    answer = httpx.post(f"{server.url}/pause?{query}", headers=HEADERS, timeout=PATIENCE)
    assert (answer.status_code, query.split("=")[0] in answer.json()["error"]["message"]) == (400, True)
    assert get(server, "/is_paused").json() == {"is_paused": False}


# ---- sleeping -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
def test_a_server_sleeps_and_wakes(server: Server, send: Send, level: int) -> None:
    alone = text_of(send(max_tokens=20).result())
    told = post(server, f"/sleep?level={level}")
    assert told == {"status": "asleep", "level": level, "is_sleeping": True}
    assert get(server, "/is_sleeping").json() == {"is_sleeping": True}
    assert get(server, "/health").status_code == 200
    ready = get(server, "/health/ready")
    assert (ready.status_code, "asleep" in ready.json()["reason"]) == (503, True)
    assert get(server, "/v2/health/ready").status_code == 503
    assert not grpc_ready(server.api)
    state = {1: "weights_offloaded", 2: "discard_all"}[level]
    page = get(server, "/metrics").text
    assert any(f'sleep_state="{state}"' in line and line.endswith(" 1.0") for line in page.splitlines())
    refused = httpx.post(f"{server.url}/resume", headers=HEADERS, timeout=PATIENCE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "order_not_obeyed")
    waiting = send(max_tokens=20, cache_salt="came while it slept")
    time.sleep(0.3)
    assert not waiting.done()
    assert post(server, "/wake_up") == {"status": "awake", "is_sleeping": False}
    assert text_of(waiting.result()) == alone
    assert get(server, "/health/ready").status_code == 200
    assert get(server, "/v2/health/ready").status_code == 200
    assert grpc_ready(server.api)
    assert get(server, "/is_sleeping").json() == {"is_sleeping": False}


@pytest.mark.dealt
def test_what_ran_goes_on_after_a_sleep_and_level_2_would_lose_it(server: Server, send: Send, undisturbed: str) -> None:
    going = send(cache_salt="kept")
    (engine,) = server.api.client.engines
    wait_until(lambda: any(ticket.submit is None for ticket in engine._tickets.values()))  # it has a token
    refused = httpx.post(f"{server.url}/sleep?level=2&mode=keep", headers=HEADERS, timeout=PATIENCE)
    assert refused.status_code == 409
    assert "have written" in refused.json()["error"]["message"]
    assert get(server, "/is_paused").json() == {"is_paused": False}
    post(server, "/sleep?mode=keep")
    assert post(server, "/wake_up?tags=weights")["is_sleeping"]
    assert not post(server, "/wake_up?tags=kv_cache")["is_sleeping"]
    assert text_of(going.result()) == undisturbed


def test_weights_are_read_again(server: Server, send: Send, tmp_path: Path) -> None:
    alone = text_of(send(max_tokens=20).result())
    copy = shutil.copytree(EMBEDDED_MODEL, tmp_path / "copy")
    weights = load_file(copy / "model.safetensors")
    save_file({name: x.flip(0) if x.dim() == 1 else x for name, x in weights.items()}, copy / "model.safetensors")
    assert post(server, f"/reload_weights?path={copy}") == {"status": "reloaded", "is_paused": False}
    assert text_of(send(max_tokens=20, cache_salt="other").result()) != alone
    assert post(server, f"/reload_weights?path={EMBEDDED_MODEL}")["status"] == "reloaded"
    assert text_of(send(max_tokens=20, cache_salt="again").result()) == alone
    for path, why in ((tmp_path / "nowhere", "nowhere"), (EMBEDDED_MODEL.parent / "embedded-draft", "another model")):
        refused = httpx.post(f"{server.url}/reload_weights?path={path}", headers=HEADERS, timeout=PATIENCE)
        assert (refused.status_code, why in refused.json()["error"]["message"]) == (409, True)
        assert text_of(send(max_tokens=20).result()) == alone


@pytest.mark.parametrize(
    "path", ["/sleep?level=3", "/sleep?levle=1", "/wake_up?tags=wights", "/pause?clear_cache=true"]
)
def test_parameters_that_are_wrong_are_told(server: Server, path: str) -> None:
    answer = httpx.post(server.url + path, headers=HEADERS, timeout=PATIENCE)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("level", "levle", "tags", "clear_cache")


def test_these_routes_ask_for_the_operators_key(server: Server) -> None:
    for path in ("/pause", "/resume", "/sleep", "/wake_up", "/reload_weights"):
        assert httpx.post(server.url + path, timeout=PATIENCE).status_code == 401, path


def test_damaged_weights_leave_the_old_ones(server: Server, send: Send, tmp_path: Path) -> None:
    alone = text_of(send(max_tokens=20).result())
    copy = shutil.copytree(EMBEDDED_MODEL, tmp_path / "copy")
    whole = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused = httpx.post(f"{server.url}/reload_weights?path={copy}", headers=HEADERS, timeout=PATIENCE)
    assert refused.status_code == 409
    assert text_of(send(max_tokens=20, cache_salt="still here").result()) == alone


# ---- orders that meet ------------------------------------------------------------------------------------------------


def together(server: Server, send: Send, *paths: str) -> list[httpx.Response]:
    """The answers to orders that are all there, in this order, before the first can be obeyed: they wait for a request
    that came before them."""
    with ThreadPoolExecutor(len(paths)) as threads:
        with stopped(server):
            going = send(max_tokens=20, cache_salt=" ".join(paths))
            wait_until(lambda: server.api.client.num_open == 1)
            answers = orders(server, threads, *paths)
        found = [answer.result() for answer in answers]
    assert text_of(going.result())
    return found


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """Let the engine find all at once what is sent meanwhile."""
    (engine,) = server.api.client.engines
    assert engine.facts is not None
    os.kill(engine.facts.process_id, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(engine.facts.process_id, signal.SIGCONT)


def orders(server: Server, threads: ThreadPoolExecutor, *paths: str) -> list[Future[httpx.Response]]:
    """The answers to come to orders that are sent one after the other."""
    answers = []
    for place, path in enumerate(paths, 1):
        answers.append(threads.submit(httpx.post, f"{server.url}{path}", headers=HEADERS, timeout=PATIENCE))
        orders_under_way(server, place)
    return answers


def orders_under_way(server: Server, count: int) -> None:
    """Wait until so many orders were sent to the engine and not answered."""
    (engine,) = server.api.client.engines
    wait_until(lambda: len(engine._questions[Standing]) == count)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_two_reloads_at_once_leave_an_engine_that_runs(server: Server, send: Send) -> None:
    alone = text_of(send(max_tokens=20).result())
    answers = together(server, send, "/reload_weights?mode=wait", "/reload_weights?mode=wait")
    assert [answer.json() for answer in answers] == [{"status": "reloaded", "is_paused": False}] * 2
    assert text_of(send(max_tokens=20, cache_salt="after both").result()) == alone


def test_a_pause_behind_a_reload_is_one(server: Server, send: Send) -> None:
    reloaded, paused = together(server, send, "/reload_weights?mode=wait", "/pause?mode=wait")
    assert reloaded.status_code == 200
    assert paused.json() == {"status": "paused", "is_paused": True}
    assert get(server, "/is_paused").json() == {"is_paused": True}


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_behind_a_reload_is_one(server: Server, send: Send, level: int) -> None:
    reloaded, slept = together(server, send, "/reload_weights?mode=wait", f"/sleep?mode=wait&level={level}")
    assert reloaded.status_code == 200
    assert slept.json() == {"status": "asleep", "level": level, "is_sleeping": True}
    waiting = send(max_tokens=5)
    assert post(server, "/wake_up") == {"status": "awake", "is_sleeping": False}
    assert text_of(waiting.result())


def test_an_order_that_fails_ends_nobody_elses_pause(server: Server, send: Send) -> None:
    paused, refused = together(server, send, "/pause?mode=wait", "/reload_weights?path=/nowhere")
    assert paused.json() == {"status": "paused", "is_paused": True}
    assert refused.status_code == 409
    assert get(server, "/is_paused").json() == {"is_paused": True}


@pytest.mark.dealt
def test_no_request_ends_for_an_order_that_is_in_vain(server: Server, send: Send) -> None:
    going = send(cache_salt="in vain")
    open_requests(server, 1)
    for path in ("/nowhere", "/%00", EMBEDDED_MODEL.parent / "embedded-draft", EMBEDDED_MODEL / "config.json"):
        answer = httpx.post(f"{server.url}/reload_weights?path={path}", headers=HEADERS, timeout=PATIENCE)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "order_not_obeyed")
    assert text_of(going.result())


def test_answers_come_in_the_order_of_the_orders(server: Server) -> None:
    """Those that are refused at once do not overtake others."""
    post(server, "/sleep")
    with ThreadPoolExecutor(2) as threads:
        with stopped(server):
            answers = orders(server, threads, "/sleep", "/resume")
        slept, resumed = (answer.result() for answer in answers)
    post(server, "/wake_up")
    assert slept.json() == {"status": "asleep", "level": 1, "is_sleeping": True}
    assert resumed.status_code == 409


def test_who_sleeps_again_gives_back_what_a_part_woke_up(server: Server, send: Send) -> None:
    post(server, "/sleep")
    assert post(server, "/wake_up?tags=weights")["is_sleeping"]
    post(server, "/sleep")
    assert post(server, "/wake_up?tags=kv_cache")["is_sleeping"], "the weights are not there"
    assert not post(server, "/wake_up?tags=weights")["is_sleeping"]
    assert text_of(send(max_tokens=5).result())


def test_an_engine_of_level_2_goes_on_when_all_was_asked_for(server: Server, send: Send) -> None:
    post(server, "/sleep?level=2")
    waiting = send(max_tokens=5)
    open_requests(server, 1)
    post(server, "/wake_up?tags=weights")
    assert get(server, "/is_paused").json() == {"is_paused": True}
    assert not waiting.done()
    post(server, "/wake_up?tags=kv_cache")
    assert text_of(waiting.result())


@pytest.mark.thorough
def test_a_pause_ends_with_the_api_server_that_waited_for_it(
    server: Server, send: Send, start_server: StartServer
) -> None:
    (engine,) = server.api.client.engines
    with start_server(engine=Path(engine.path), admin_key=(KEY,)) as other:
        going = send(max_tokens=1000, cache_salt="the other one ends")
        open_requests(server, 1)
        gone = Thread(target=abandoned, args=(f"{other.url}/sleep?mode=wait",))
        gone.start()
        orders_under_way(other, 1)
    gone.join()
    later = send(max_tokens=5)
    assert not going.done()
    assert text_of(going.result())
    assert text_of(later.result())
    assert get(server, "/is_paused").json() == {"is_paused": False}


def abandoned(url: str) -> None:
    with suppress(httpx.HTTPError):
        httpx.post(url, headers=HEADERS, timeout=PATIENCE)


# ---- a model that is another one afterwards --------------------------------------------------------------------------


def test_what_weights_bring_with_them_is_told(server: Server, send: Send, tmp_path: Path) -> None:
    """The tokens that end an answer are those of the folder that is served now."""
    first = text_of(send(max_tokens=20, ignore_eos=False, return_token_ids=True).result())
    token = send(max_tokens=20, ignore_eos=False, return_token_ids=True).result().json()["choices"][0]["token_ids"][3]
    copy = shutil.copytree(EMBEDDED_MODEL, tmp_path / "copy")
    for name in ("config.json", "generation_config.json"):
        (copy / name).write_text(json.dumps(json.loads((copy / name).read_text()) | {"eos_token_id": token}))
    try:
        post(server, f"/reload_weights?path={copy}")
        assert get(server, "/server_info").json()["engine"]["folder"] == str(copy)
        ended = send(max_tokens=20, ignore_eos=False).result().json()["choices"][0]
        assert ended["finish_reason"] == "stop"
        assert first.startswith(ended["text"])
    finally:
        post(server, f"/reload_weights?path={EMBEDDED_MODEL}")


def test_who_has_no_more_room_is_told(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others took memory while the engine slept, so its cache is smaller."""
    options = {"model": str(EMBEDDED_MODEL), "device": "cpu", "dtype": DTYPE}
    config = LLMConfig(**options, kv_cache_memory=1 << 24)
    path = str(tmp_path / "socket")
    settings = EngineSettings(socket=path, options=options, served_name=MODEL)
    host = EngineHost(assemble(config), config, EngineSocket(path), settings)
    thread = Thread(target=host.run, daemon=True)
    thread.start()
    small = partial(replace, kv_cache_memory=1 << 22)
    monkeypatch.setattr(loaded, "assemble", lambda config, **more: assemble(small(config), **more))
    settings_of_api = {"admin_key": (KEY,), "request_timeout": 30}
    with start_server(engine=Path(path), **settings_of_api) as server, ThreadPoolExecutor(2) as threads:
        post(server, "/sleep?level=2")
        url = f"{server.url}/v1/completions"
        long = threads.submit(httpx.post, url, json=BODY | {"max_tokens": 1000}, timeout=PATIENCE)
        open_requests(server, 1)
        short = threads.submit(httpx.post, url, json=BODY | {"max_tokens": 5}, timeout=PATIENCE)
        open_requests(server, 2)
        post(server, "/wake_up")
        assert text_of(short.result())
        refused = long.result()
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
        assert get(server, "/server_info").json()["engine"]["cache_tokens"] < 1000
        assert server.wait_idle()
        host.stop()
        thread.join(PATIENCE)
