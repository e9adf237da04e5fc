"""Clients that mean no good: requests that two parsers could read in two ways, headers that h11 refuses, slow ones."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator

import pytest
from starlette.types import Message

from ridgeline.core.settings.routing import RouteConfig
from ridgeline.serving.http import wire_bounds
from ridgeline.serving.router.app import RouterApp
from tests.serving.routing.running import PATIENCE, FakeWorker, RunningRouter, routing

CHAT = "/v1/chat/completions"
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\n".encode()
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n"
WITH_BODY = b"Content-Length: 2\r\n\r\n{}"
SMUGGLED = b"POST /sleep HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"

REFUSED = {
    "a length and chunks": CHUNKED + b"Content-Length: 4\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 4\r\n" + WITH_BODY,
    "an unknown coding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "chunks that are not the last coding": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "chunks twice": CHUNKED + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "a blank before the colon": HEAD + b"Content-Length : 2\r\n\r\n{}",
    "a header over two lines": HEAD + b"X-A: 1\r\n  b\r\n" + WITH_BODY,
    "lines that end in LF": HEAD.replace(b"\r", b"") + WITH_BODY.replace(b"\r", b""),
    "a NUL": HEAD + b"X-A: a\0b\r\n" + WITH_BODY,
    "a lone CR": HEAD + b"X-A: a\rX-B: c\r\n" + WITH_BODY,
    "a length with a sign": HEAD + b"Content-Length: +2\r\n\r\n{}",
    "a chunk of less than nothing": CHUNKED + b"\r\n-2\r\n{}\r\n0\r\n\r\n",
    "a chunk longer than it says": CHUNKED + b"\r\n1\r\n{}\r\n0\r\n\r\n",
    "a tunnel": b"CONNECT elsewhere:80 HTTP/1.1\r\nHost: a\r\n\r\n",
}


@pytest.fixture(scope="module")
def worker() -> Iterator[FakeWorker]:
    made = FakeWorker()
    yield made
    made.close()


@pytest.fixture(scope="module")
def router(worker: FakeWorker) -> Iterator[RunningRouter]:
    with routing(worker) as running:
        yield running


def sent(router: RunningRouter, data: bytes, answers: int = 1) -> bytes:
    """Return what comes back until so many answers begin, or the connection ends."""
    with socket.create_connection(("127.0.0.1", router.port), PATIENCE) as raw:
        raw.sendall(data)
        got = b""
        while got.count(b"HTTP/1.1 ") < answers or b"\r\n\r\n" not in got.rpartition(b"HTTP/1.1 ")[2]:
            if not (piece := raw.recv(65536)):
                break
            got += piece
        return got


@pytest.mark.parametrize("how", REFUSED)
def test_what_could_be_read_in_two_ways_is_refused(router: RunningRouter, worker: FakeWorker, how: str) -> None:
    before = worker.counted()["requests"]
    assert sent(router, REFUSED[how] + SMUGGLED).startswith(b"HTTP/1.1 400")
    assert worker.counted()["requests"] == before


def test_a_request_in_the_body_of_another_is_a_body(router: RunningRouter, worker: FakeWorker) -> None:
    """One behind a body is a request of its own, and looked at like any other."""
    before = worker.counted()["requests"]
    inner = b'{"x": "' + SMUGGLED.replace(b"\r\n", b"\\r\\n") + b'"}'
    got = sent(router, HEAD + b"Content-Length: %d\r\n\r\n" % len(inner) + inner + SMUGGLED, answers=2)
    assert (got.count(b" 200 "), got.count(b" 403 ")) == (1, 1)
    assert worker.counted()["requests"] == before + 1
    assert worker.counted()["ready"]


def test_connection_names_no_header_away_that_the_router_needs(router: RunningRouter) -> None:
    got = sent(router, HEAD + b"Connection: close, content-length, host, x-request-id, authorization\r\n"
               b"Authorization: Bearer mine\r\nX-Forwarded-For: 1.2.3.4\r\n" + WITH_BODY, answers=2)  # fmt: skip
    headers = dict(json.loads(got.partition(b"\r\n\r\n")[2])["headers"])
    assert headers["authorization"] == "Bearer mine"
    assert headers["content-length"] == "2"
    assert headers["x-forwarded-for"] == "127.0.0.1"
    assert "connection" not in headers


def test_a_header_that_the_client_library_refuses_is_the_requests_fault(worker: FakeWorker) -> None:
    """The parser of the router's own side lets none through that is known, so this one goes around it."""
    told: list[Message] = []

    async def asked() -> None:
        app = RouterApp(RouteConfig(worker_urls=(worker.url,), access_log=False))
        app.workers.each[0].why = ""
        came = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

        async def receive() -> Message:
            if (message := next(came, None)) is not None:
                return message
            return await asyncio.Future()  # the client stays

        async def send(message: Message) -> None:
            told.append(message)

        scope = {
            "type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b"",
            "headers": [(b"x-odd", b"a\x0bb")], "client": ("127.0.0.1", 1), "http_version": "1.1", "root_path": "",
            "scheme": "http", "server": ("127.0.0.1", 2),
        }  # fmt: skip
        await app(scope, receive, send)
        assert not app.workers.each[0].errors
        await app.workers.close()

    asyncio.run(asked())
    assert told[0]["status"] == 400
    assert b"a header of the request is not valid HTTP" in told[1]["body"]


def test_clients_that_send_a_letter_at_a_time_are_ended_and_delay_no_other(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_bounds, "HEAD_TIMEOUT", 1.5)
    slow = [socket.create_connection(("127.0.0.1", router.port), PATIENCE) for _ in range(20)]
    try:
        for letter in (b"P", b"O", b"S"):
            for each in slow:
                each.sendall(letter)
            assert sent(router, HEAD + WITH_BODY).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        assert all(each.recv(65536).startswith(b"HTTP/1.1 504") for each in slow)
        assert time.monotonic() - began < PATIENCE
    finally:
        for each in slow:
            each.close()
