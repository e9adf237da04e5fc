"""Servers behind the router that die, hang, leave and come back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import httpx
import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.routing import RouteConfig
from tests.serving.routing.running import PATIENCE, ROOT, FakeWorker, HeldPort, routing, wait_for

CHAT = "/v1/chat/completions"
Make = Callable[..., FakeWorker]


def events(url: str, path: str = CHAT, **body: object) -> list[str]:
    with httpx.stream("POST", url + path, json={"stream": True, **body}, timeout=PATIENCE) as answer:
        assert answer.status_code == 200
        return [line for line in answer.iter_lines() if line]


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
def test_a_stream_whose_server_dies_ends_with_an_event_that_says_so(new_worker: Make, path: str) -> None:
    """The half event that came last is not shown, and nothing is asked of the other server."""
    dying, other = new_worker(), new_worker()
    with routing(dying, other) as router:
        lines = events(router.url, path, pieces=5, cut=2)
        data = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        assert [each["n"] for each in data[:2]] == [0, 1]
        assert len(data) == 3
        if path == CHAT:
            assert data[2]["error"]["code"] == "worker_lost"
        else:
            assert lines[2] == "event: error"
            assert data[2]["type"] == "error"
        assert other.counted()["requests"] == 0
        assert httpx.post(router.url + CHAT, json={}).json()["pid"] == other.process.pid
        assert router.app.workers.each[0].errors["stream"] == 1


def test_an_event_that_says_so_is_seen_behind_a_long_half_event(new_worker: Make) -> None:
    """An event that is too long to be held goes out in parts. The last one begins anew behind what had come of it."""
    with routing(new_worker()) as router:
        body = {"stream": True, "pieces": 5, "cut": 2, "half": 200_000}
        whole = httpx.post(router.url + CHAT, json=body, timeout=PATIENCE).text
        found = [each for each in whole.split("\n\n") if each]
        assert len(found) == 4
        assert found[2].startswith("data: ")
        assert found[3].startswith("data: ")
        assert json.loads(found[3][6:])["error"]["code"] == "worker_lost"


def test_lines_of_a_stream_end_with_one_too(new_worker: Make) -> None:
    with routing(new_worker()) as router:
        lines = events(router.url, "/api/chat", pieces=5, cut=2)
        assert [json.loads(line).get("n") for line in lines[:2]] == [0, 1]
        assert "lost" in json.loads(lines[-1])["error"]


def test_a_death_ends_only_the_streams_of_that_server(new_worker: Make) -> None:
    dying, other = new_worker(), new_worker()
    found: list[list[str]] = []
    with routing(dying, other) as router:
        body = {"pieces": 20, "led": True}
        threads = [threading.Thread(target=lambda: found.append(events(router.url, **body))) for _ in range(6)]
        for each in threads:
            each.start()
        wait_for(lambda: [each.counted()["requests"] for each in (dying, other)] == [3, 3])
        for each in (dying, other):
            each.go(5)
        dying.end()
        other.go(20)
        for each in threads:
            each.join(PATIENCE)
        whole = [lines for lines in found if lines[-1] == "data: [DONE]"]
        broken = [lines for lines in found if "worker_lost" in lines[-1]]
        assert (len(whole), len(broken)) == (3, 3)
        assert all(len(lines) == 21 for lines in whole)
        assert other.counted()["requests"] == 3


def test_a_request_that_was_sent_is_never_sent_again(new_worker: Make) -> None:
    dying, other = new_worker(), new_worker()
    with routing(dying, other) as router:
        answer = httpx.post(router.url + CHAT, json={"cut": -1}, timeout=PATIENCE)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "worker_lost")
        assert "not sent again" in answer.json()["error"]["message"]
        assert other.counted()["requests"] == 0


def test_where_no_connection_is_made_another_server_is_asked(new_worker: Make) -> None:
    """Between two looks the router does not know yet that a server is gone. No request fails."""
    dying, other = new_worker(), new_worker()
    with routing(dying, other, health_interval=60.0) as router:
        dying.end()
        pids = [httpx.post(router.url + CHAT, json={}).json()["pid"] for _ in range(4)]
        assert pids == [other.process.pid] * 4
        assert router.app.workers.retries == 1
        assert httpx.get(router.url + "/health").json() == {"status": "ok", "down": router.app.workers.down()}


def test_a_server_comes_back_and_its_cache_is_forgotten(new_worker: Make) -> None:
    worker, other = new_worker(), new_worker()
    text = "x" * 4000
    with routing(worker, other, policy="prefix") as router:
        first = httpx.post(router.url + CHAT, json={"prompt": text}).json()["pid"]
        assert first == worker.process.pid
        worker.end()
        wait_for(lambda: router.ready() == 1)
        assert httpx.get(router.url + "/health/ready").status_code == 200
        assert httpx.post(router.url + CHAT, json={"prompt": text}).json()["pid"] == other.process.pid
        worker.start()
        wait_for(lambda: router.ready() == 2)
        assert httpx.post(router.url + CHAT, json={"prompt": text}).json()["pid"] == other.process.pid


def test_without_a_server_the_router_says_so_and_waits(new_worker: Make) -> None:
    worker = new_worker()
    worker.end()
    with routing(worker, ready=False) as router:
        for path in ("/health", "/health/ready", "/v1/models"):
            assert httpx.get(router.url + path).status_code == 503
        assert httpx.get(router.url + "/health/live").status_code == 200
        answer = httpx.post(router.url + CHAT, json={})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        worker.start()
        wait_for(lambda: router.ready() == 1)
        assert httpx.post(router.url + CHAT, json={}).status_code == 200


def test_a_server_that_says_it_is_not_ready_gets_nothing_new(new_worker: Make) -> None:
    leaving, other = new_worker(), new_worker()
    with routing(leaving, other) as router:
        httpx.post(leaving.url + "/unready")
        wait_for(lambda: router.ready() == 1)
        assert "503" in router.app.workers.down()[0]
        assert {httpx.post(router.url + CHAT, json={}).json()["pid"] for _ in range(3)} == {other.process.pid}


@pytest.mark.dealt
def test_a_server_that_hangs_is_not_ready_and_its_streams_end(new_worker: Make) -> None:
    """The kernel still takes its connections. It is out at the first look that is not answered."""
    hanging, other = new_worker(), new_worker()
    found: list[list[str]] = []
    with routing(hanging, other, health_timeout=1.5, hung_timeout=3.0) as router:
        threads = [
            threading.Thread(target=lambda: found.append(events(router.url, pieces=30, led=True))) for _ in range(2)
        ]
        for each in threads:
            each.start()
        wait_for(lambda: [each.counted()["requests"] for each in (hanging, other)] == [1, 1])
        hanging.go(2)
        hanging.send(signal.SIGSTOP)
        other.go(30)
        wait_for(lambda: router.ready() == 1)
        assert httpx.post(router.url + CHAT, json={}).json()["pid"] == other.process.pid
        for each in threads:
            each.join(PATIENCE)
        assert sorted(lines[-1] == "data: [DONE]" for lines in found) == [False, True]
        assert [json.loads(lines[-1][6:])["error"]["code"] for lines in found if "DONE" not in lines[-1]] == ["timeout"]
        hanging.send(signal.SIGCONT)
        wait_for(lambda: router.ready() == 2)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "ridgeline", "route", *words]


def test_the_command_drains_before_it_ends(new_worker: Make) -> None:
    worker, held = new_worker(), HeldPort()
    url = f"http://127.0.0.1:{held.number}"
    words = ("--worker-urls", worker.url, "--policy", "least", "--port", str(held.number))
    process = subprocess.Popen(command(*words), cwd=ROOT)
    found: list[list[str]] = []

    def up() -> bool:
        try:
            return httpx.get(url + "/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_for(up)
        thread = threading.Thread(target=lambda: found.append(events(url, pieces=20, led=True)))
        thread.start()
        wait_for(lambda: worker.counted()["requests"] == 1)
        with httpx.Client() as client:
            client.get(url + "/health/live")
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: client.get(url + "/health/ready").status_code == 503)
            assert client.post(url + CHAT, json={}).status_code == 503
        worker.go(20)
        thread.join(PATIENCE)
        assert found[0][-1] == "data: [DONE]"
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
        held.close()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "the router has no workers; name them with --worker-urls http://HOST:PORT …"),
        (["--worker-urls", "ftp://a"], "'ftp://a' is no worker; give http://HOST:PORT."),
        (["--worker-urls", "http://a:1", "http://a:1/"], "the worker http://a:1 is named twice"),
        (["--worker-urls", "http://me:secret@a"], "a worker's URL holds a user or a password"),
        (
            ["--worker-urls", "http://a", "--policy", "best"],
            "unknown routing rule 'best'; known: least, prefix, random",
        ),
        (["--worker-urls", "http://a", "--max-buffered-bytes", "5"], "max_buffered_bytes must be at least"),
        (["--worker-urls", "http://a", "--port", "99999"], "there is no port 99999"),
        (["--worker-urls", "http://a", "--health-timeout", "0"], "health_timeout must be a number of seconds above 0"),
        (["--worker-urls", "http://a", "--host", "256.1.1.1"], "cannot listen on port 8000 of '256.1.1.1'"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ridgeline.cli import main

    monkeypatch.setattr(sys, "argv", ["ridgeline", "route", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert "secret" not in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("url", ["http://a:99999", "http://", "a:8000", "http://a/path", "http://a?x=1", "http://a b"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidConfig, match="is no worker"):
        RouteConfig(worker_urls=(url,))


def test_addresses_have_one_form() -> None:
    given = ("http://A", "https://b/", "http://[::1]:9")
    assert RouteConfig(worker_urls=given).workers == ("http://a:80", "https://b:443", "http://[::1]:9")
