"""The router before servers of its tests: what passes, what does not, and as it comes."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import closing

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ridgeline.serving.errors import Unavailable
from ridgeline.serving.http.middleware import ADMIN
from ridgeline.serving.router.asked import Asked
from ridgeline.serving.router.headers import to_server
from ridgeline.serving.router.paths import OWN, STORED, NotRouted, target
from tests.serving.routing.running import FakeWorker, RunningRouter, routing, wait_for

CHAT = "/v1/chat/completions"
Pair = tuple[FakeWorker, FakeWorker]


def post(router: RunningRouter, path: str = CHAT, **body: object) -> httpx.Response:
    return httpx.post(router.url + path, json=body, timeout=30.0)


def test_a_streams_pieces_come_as_they_are_written(router: RunningRouter, pair: Pair) -> None:
    """Each of ten pieces is here before the next one is written, which waits for that."""
    came = []
    body = {"stream": True, "pieces": 10, "led": True}
    with httpx.stream("POST", router.url + CHAT, json=body, timeout=60.0) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                came.append(json.loads(line[6:])["n"])
                for each in pair:
                    each.go()
    assert came == list(range(10))


def test_an_event_longer_than_one_read_comes_whole(router: RunningRouter) -> None:
    with httpx.stream("POST", router.url + CHAT, json={"stream": True, "pieces": 3, "bytes": 300_000}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert [len(json.loads(line[6:])["x"]) for line in lines[:3]] == [300_000] * 3
    assert lines[3:] == ["data: [DONE]"]


def test_requests_go_round(router: RunningRouter, pair: Pair) -> None:
    pids = [post(router).json()["pid"] for _ in range(4)]
    assert pids[0] == pids[2] != pids[1] == pids[3]
    assert {pids[0], pids[1]} == {each.process.pid for each in pair}


def test_a_model_goes_to_the_server_that_has_it(router: RunningRouter, pair: Pair) -> None:
    wait_for(lambda: all(each.models is not None for each in router.app.workers.each))
    assert {post(router, model="other").json()["pid"] for _ in range(3)} == {pair[1].process.pid}


def test_a_model_whose_server_is_out_waits_for_it(router: RunningRouter) -> None:
    workers = router.app.workers
    wait_for(lambda: all(each.models is not None for each in workers.each))
    asked = Asked(model="other")
    with pytest.raises(Unavailable, match="is ready; try again soon"):
        workers.choose(asked, None, [workers.each[1]])


def test_blanks_behind_a_header_are_left_out() -> None:
    sent = to_server([(b"x-own", b"a \t ")], b"host", "id", "", 3)
    assert (b"x-own", b"a") in sent


def test_the_list_of_models_is_the_union(router: RunningRouter) -> None:
    found = httpx.get(router.url + "/v1/models").json()
    assert found["object"] == "list"
    assert [entry["id"] for entry in found["data"]] == ["m", "other"]


def test_a_clients_key_passes_and_what_servers_say_of_it_comes_back(router: RunningRouter) -> None:
    answer = httpx.get(router.url + "/v1/models", headers={"authorization": "Bearer wrong"})
    assert (answer.status_code, answer.json()) == (401, {"error": {"message": "no such key"}})
    sent = httpx.post(router.url + CHAT, json={}, headers={"authorization": "Bearer k", "x-api-key": "k2"}).json()
    assert ["authorization", "Bearer k"] in sent["headers"]
    assert ["x-api-key", "k2"] in sent["headers"]


def test_one_request_id_goes_through(router: RunningRouter) -> None:
    answer = httpx.post(router.url + CHAT, json={}, headers={"x-request-id": "mine-1"})
    assert answer.headers.get_list("x-request-id") == ["mine-1"]
    assert ["x-request-id", "mine-1"] in answer.json()["headers"]
    made = httpx.post(router.url + CHAT, json={}, headers={"x-request-id": "no good"})
    assert [value for name, value in made.json()["headers"] if name == "x-request-id"] == [made.headers["x-request-id"]]
    assert made.headers["x-request-id"].startswith("req-")


def test_headers_of_a_hop_stay_on_it(router: RunningRouter) -> None:
    given = {
        "connection": "keep-alive, x-mine, authorization",
        "x-mine": "1",
        "te": "trailers",
        "proxy-authorization": "Basic x",
        "keep-alive": "5",
        "x-forwarded-for": "6.6.6.6",
        "forwarded": "for=6.6.6.6",
        "authorization": "Bearer k",
        "x-end-to-end": "1",
    }
    answer = httpx.post(router.url + CHAT, json={}, headers=given)
    got = dict(answer.json()["headers"])
    assert not got.keys() & {"x-mine", "te", "proxy-authorization", "keep-alive", "forwarded", "transfer-encoding"}
    assert (got["x-end-to-end"], got["authorization"], got["x-forwarded-for"]) == ("1", "Bearer k", "127.0.0.1")
    assert not answer.headers.keys() & {"x-hop", "keep-alive"}
    assert answer.headers["x-kept"] == "yes"


@pytest.mark.parametrize("path", [*ADMIN, "/v1/requests/1", "//sleep", "/v1/models/../../sleep", "/%73leep"])
def test_no_admin_route_passes(router: RunningRouter, pair: Pair, path: str) -> None:
    before = [each.counted()["requests"] for each in pair]
    with closing(socket.create_connection(("127.0.0.1", router.port))) as raw:  # clients tidy paths
        raw.sendall(f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\nauthorization: Bearer k\r\n\r\n".encode())
        assert raw.recv(100).split()[1] in (b"403", b"404")
    assert [each.counted()["requests"] for each in pair] == before


def test_every_route_of_the_server_is_passed_on_or_is_known_not_to_be() -> None:
    """The server's own list of routes (tests/public_surface.txt), beside the router's."""
    with open("tests/public_surface.txt") as file:
        routes = [line.split()[1:3] for line in file if line.startswith("http ")]
    pages = {"/", "/docs", "/redoc", "/openapi.json", "/slots"}
    assert len(routes) > 60
    for method, path in routes:
        if path in OWN or path in pages or path.startswith(ADMIN) or STORED.fullmatch(path):
            continue
        assert target(method, path.replace("{name:path}", "a/b").replace("{model:path}", "a/b"), b"")


@pytest.mark.parametrize("path", ["/add_worker", "/flush_cache", "/v2/repository/models/m/load", "/v1/files", "/"])
def test_what_is_not_known_is_not_passed_on(path: str) -> None:
    for method in ("GET", "POST", "PUT", "DELETE", "CONNECT"):
        with pytest.raises(NotRouted):
            target(method, path, b"")


def test_paths_and_queries_arrive_as_they_were_meant(router: RunningRouter) -> None:
    told = httpx.get(router.url + "/v1/models/org%2Fname%20x?a=b&c=%20").json()
    assert told["path"] == "/v1/models/org/name%20x"
    assert told["query"] == "a=b&c=%20"


def test_a_body_beyond_its_bound_is_refused(router: RunningRouter, pair: Pair) -> None:
    before = [each.counted()["requests"] for each in pair]
    answer = httpx.post(router.url + CHAT, content=b"x" * ((1 << 20) + 1))
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"

    def chunks():  # type: ignore[no-untyped-def]
        yield from [b"x" * 65536] * 20

    assert httpx.post(router.url + CHAT, content=chunks()).status_code == 413
    assert [each.counted()["requests"] for each in pair] == before
    assert post(router, text="x" * ((1 << 20) - 20)).json()["size"] > 1_000_000


def test_too_many_headers_are_refused(router: RunningRouter) -> None:
    many = {f"x-{number}": "1" for number in range(300)}
    assert httpx.post(router.url + CHAT, json={}, headers=many).status_code == 431


def test_what_is_no_json_is_the_servers_to_judge(router: RunningRouter) -> None:
    assert httpx.post(router.url + "/v1/audio/transcriptions", content=b"\xff[[[").status_code == 500  # the fake's


def test_bytes_of_open_requests_are_bounded_and_given_back(pair: Pair) -> None:
    settings = {"max_body_bytes": 1 << 20, "max_buffered_bytes": (1 << 20) + (800 << 10)}
    with routing(*pair, **settings) as router, httpx.Client() as client:
        slow = {"stream": True, "pieces": 100, "pause": 0.1}
        with client.stream("POST", router.url + CHAT, json=slow), client.stream("POST", router.url + CHAT, json=slow):
            held = router.app.budget.used
            assert 2 * (192 << 10) <= held < 2 * (192 << 10) + 1000  # answers' bytes; the bodies were sent
            full = post(router, prompt="x" * 1_000_000)  # the text counts twice, as body and as what rules read
            assert (full.status_code, full.json()["error"]["code"]) == (503, "router_full")
            assert int(full.headers["retry-after"]) > 0
            assert post(router, prompt="x" * 100_000).status_code == 200
        wait_for(lambda: router.app.budget.used == 0)
        assert post(router, prompt="x" * 500_000).status_code == 200
        wait_for(lambda: router.app.budget.used == 0)


def test_connections_of_one_address_are_bounded(pair: Pair) -> None:
    with routing(*pair, max_connections_per_client=3) as router, httpx.Client() as client:
        held = [socket.create_connection(("127.0.0.1", router.port)) for _ in range(3)]
        answer = client.get(router.url + "/health/live")
        assert answer.status_code == 429
        assert "--max-connections-per-client" in answer.json()["error"]["message"]
        held.pop().close()
        wait_for(lambda: client.get(router.url + "/health/live").status_code == 200)
        for each in held:
            each.close()


def test_a_client_that_reads_nothing_delays_no_other(router: RunningRouter) -> None:
    """It asks for 64 MB and reads none. The router holds little of it, and others are answered as ever."""
    body = json.dumps({"stream": True, "pieces": 64, "bytes": 1 << 20}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    slow = [socket.create_connection(("127.0.0.1", router.port)) for _ in range(4)]
    try:
        for each in slow:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            each.sendall(head + body)
        wait_for(lambda: router.app.workers.num_open == 4)
        time.sleep(0.5)
        took = []
        for _ in range(20):
            began = time.monotonic()
            assert post(router).status_code == 200
            took.append(time.monotonic() - began)
        assert min(took) < 0.5, "all of them waited"
        wait_for(lambda: router.app.workers.num_open == 4)  # an answer is sent before its request is closed
        assert router.app.budget.used <= 4 * (192 << 10)
    finally:
        for each in slow:
            each.close()
    wait_for(lambda: router.app.workers.num_open == 0)


def test_a_client_that_leaves_ends_its_request_at_the_server(router: RunningRouter, pair: Pair) -> None:
    before = sum(each.counted()["left"] for each in pair)
    with httpx.stream("POST", router.url + CHAT, json={"stream": True, "pieces": 1000, "pause": 0.05}) as answer:
        next(answer.iter_lines())
    wait_for(lambda: sum(each.counted()["left"] for each in pair) == before + 1)
    assert router.app.workers.num_open == 0


def test_cookies_of_one_client_never_reach_another(router: RunningRouter) -> None:
    httpx.post(router.url + CHAT, json={}, headers={"cookie": "a=1"})
    assert "cookie" not in dict(post(router).json()["headers"])


def test_a_stored_response_is_asked_for_where_it_is(router: RunningRouter) -> None:
    made = [post(router, "/v1/responses", input="x").json() for _ in range(4)]
    for each in made:
        for _ in range(2):
            assert httpx.get(f"{router.url}/v1/responses/{each['id']}").json()["pid"] == each["pid"]
            again = post(router, "/v1/responses", input="y", previous_response_id=each["id"])
            assert again.json()["pid"] == each["pid"]


@pytest.mark.parametrize("named", ["header", "session_id", "prompt_cache_key", "user"])
def test_sessions_keep_their_server(pair: Pair, named: str) -> None:
    with routing(*pair, policy="session") as router:
        homes = set()
        for session in map(str, range(8)):
            headers = {"x-session-id": session} if named == "header" else {}
            body = {} if named == "header" else {named: session}
            pids = {httpx.post(router.url + CHAT, json=body, headers=headers).json()["pid"] for _ in range(3)}
            assert len(pids) == 1
            homes |= pids
        assert len(homes) == 2


def test_texts_that_go_on_stay_at_their_server(pair: Pair) -> None:
    with routing(*pair, policy="cache_aware") as router:
        for talk in range(6):
            messages = [{"role": "user", "content": f"{talk} " * 400}]
            pids = set()
            for turn in range(3):
                pids.add(post(router, messages=messages).json()["pid"])
                messages += [{"role": "assistant", "content": f"{turn} " * 50}]
            assert len(pids) == 1
        assert all(each.chosen == 9 for each in router.app.workers.each)


def test_metrics_tell_of_each_server(pair: Pair) -> None:
    with routing(*pair, admin_key="secret") as router:
        assert httpx.get(router.url + "/metrics", headers={"authorization": "Bearer other"}).status_code == 401
        with httpx.stream("POST", router.url + CHAT, json={"stream": True, "pieces": 100, "pause": 0.1}):
            page = httpx.get(router.url + "/metrics", headers={"authorization": "Bearer secret"}).text
        found = {
            (sample.name, sample.labels.get("worker")): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }
        one, other = pair
        assert found["ridgeline:router_worker_up", one.url] == 1
        outstanding = [found["ridgeline:router_worker_outstanding", each.url] for each in pair]
        assert outstanding == [found["ridgeline:router_worker_chosen_total", each.url] for each in pair]
        assert sorted(outstanding) == [0, 1]
        assert ("ridgeline:router_worker_errors_total", other.url) in found
        assert httpx.get(router.url + "/load").json()["server_load"] in (0, 1)


def test_a_server_that_does_not_say_its_models_may_have_any(pair: Pair, new_worker: Callable[..., FakeWorker]) -> None:
    with routing(*pair) as router:
        for each in router.app.workers.each:
            each.models = None
        assert {post(router, model="unheard").json()["pid"] for _ in range(2)} == {each.process.pid for each in pair}
