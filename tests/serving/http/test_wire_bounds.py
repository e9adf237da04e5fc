"""Connections that never come to the point, against a real uvicorn."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from ridgeline.serving.http import wire_bounds
from ridgeline.serving.http.wire_bounds import LARGEST_HEAD, BoundedProtocol
from tests.serving.conftest import PATIENCE, Server

LINE = b"GET / HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """Of a server whose answer is the length of the body, and that waits 1 s for heads."""
    monkeypatch.setattr(wire_bounds, "HEAD_TIMEOUT", 1.0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        body = str(size).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http=BoundedProtocol, lifespan="off", log_config=None))
    thread = threading.Thread(target=lambda: server.run([listener]), daemon=True)
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join(120)
    listener.close()


def read(connection: socket.socket, timeout: float = 120) -> bytes:
    """Until the server closes the connection."""
    connection.settimeout(timeout)
    found = b""
    try:
        while data := connection.recv(1 << 16):
            found += data
    except ConnectionResetError:
        pass
    return found


def test_a_head_has_a_largest_size(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(LINE + b"X-Long: " + b"a" * LARGEST_HEAD)
        answer = read(connection)
    assert answer.startswith(b"HTTP/1.1 431")
    assert b"headers_too_large" in answer


def test_bodies_have_not_and_connections_are_used_again(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection:
        for _ in range(3):
            connection.sendall(LINE + b"Content-Length: 300000\r\n\r\n" + b"b" * 100_000)
            time.sleep(0.6)
            connection.sendall(b"b" * 200_000)
            connection.settimeout(120)
            answer = b""
            while not answer.endswith(b"300000"):
                answer += connection.recv(1 << 16) or b"closed"
                assert not answer.endswith(b"closed")
            assert answer.startswith(b"HTTP/1.1 200")
            time.sleep(0.6)  # together longer than a head may take


@pytest.mark.parametrize(("said", "status"), [(b"", b""), (LINE, b"HTTP/1.1 504")])
def test_a_head_that_does_not_come_is_not_waited_for(address: tuple[str, int], said: bytes, status: bytes) -> None:
    with socket.create_connection(address) as connection:
        began = time.monotonic()
        connection.sendall(said)
        answer = read(connection)
        assert time.monotonic() - began > 0.9
    assert answer.startswith(status)
    assert bool(answer) is bool(status)


def test_nor_is_a_second_one(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(LINE + b"\r\n" + LINE)
        answers = read(connection)
    assert answers.startswith(b"HTTP/1.1 200")
    assert b"\r\n\r\n0HTTP/1.1 504" in answers


# ---- what is no body ------------------------------------------------------------------------------------------------

CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
MEGABYTE = 1 << 20


def send(connection: socket.socket, data: bytes) -> int:
    """Bytes that were taken, of those offered; the server may hang up."""
    sent = 0
    connection.settimeout(5)
    try:
        while sent < len(data):
            sent += connection.send(data[sent : sent + (1 << 16)])
    except OSError:
        pass
    return sent


@pytest.mark.parametrize(
    "flood",
    [
        b"0\r\n" + b"x-trailer: abcdefghij\r\n" * 100_000,
        b"0\r\nx-trailer: " + b"a" * 2 * MEGABYTE,
        b"0\r\n" + b"a" * 2 * MEGABYTE,
        b"1;" + b"a" * 2 * MEGABYTE,
        b"1\r\na\r\n" * 300_000,
        b"1;aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\na\r\n" * 60_000,
    ],
    ids=["trailers", "a trailer", "a trailer's name", "an extension", "tiny chunks", "extensions"],
)
def test_what_comes_with_a_body_in_chunks_is_bounded_as_heads_are(address: tuple[str, int], flood: bytes) -> None:
    with socket.create_connection(address) as connection:
        send(connection, CHUNKED + flood)
        answer = read(connection)
    assert not answer or b"headers_too_large" in answer
    assert b"HTTP/1.1 200" not in answer


@pytest.mark.parametrize(("rest", "status"), [(b"5\r\nhello\r\nno size\r\n", b"400"), (b"1\r\na\r\n" * 18_000, b"431")])
def test_who_is_refused_within_a_body_reads_why(address: tuple[str, int], rest: bytes, status: bytes) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(CHUNKED + rest)
        answer = read(connection)
    assert answer.startswith(b"HTTP/1.1 " + status)


def test_an_upgrade_loses_no_body_in_silence_and_holds_no_connection(address: tuple[str, int]) -> None:
    """As some clients ask for HTTP/2 with their first request."""
    upgrade = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    with socket.create_connection(address) as connection:
        connection.sendall(LINE + upgrade + b"\r\n")
        assert read(connection).startswith(b"HTTP/1.1 200")
    with socket.create_connection(address) as connection:
        connection.sendall(LINE + upgrade + b"Content-Length: 5\r\n\r\nhello")
        answer = read(connection)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"Upgrade" in answer


def protocol_of(answered: bool = True) -> tuple[BoundedProtocol, list[bytes]]:
    """One that is not on any network, and what it writes; its application answers at once, or never."""
    written: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if not answered:
            await asyncio.Event().wait()
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    class Transport(asyncio.Transport):
        closing = False

        def write(self, data: Any) -> None:
            written.append(bytes(data))

        def close(self) -> None:
            self.closing = True

        abort = close

        def is_closing(self) -> bool:
            return self.closing

        def can_write_eof(self) -> bool:
            return False

        def pause_reading(self) -> None: ...

        def resume_reading(self) -> None: ...

    config = uvicorn.Config(app, http=BoundedProtocol, lifespan="off", log_config=None)
    config.load()
    made = BoundedProtocol(config=config, server_state=ServerState(), app_state={})
    made.connection_made(Transport())
    return made, written


@pytest.mark.parametrize("answered", [False, True], ids=["before the answer", "after it"])
def test_no_trailer_is_kept(answered: bool) -> None:
    async def main() -> None:
        made, _ = protocol_of(answered)
        made.data_received(CHUNKED + b"0\r\n")
        await asyncio.sleep(0.01)
        tracemalloc.start()
        for _ in range(100):
            made.data_received(b"x-trailer: abcdefghij\r\n" * 3000)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(made.headers) == 2, "trailers became headers"
        assert held < MEGABYTE
        for task in made.tasks:
            task.cancel()

    asyncio.run(main())


def test_trailers_are_no_headers(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(CHUNKED + b"3\r\nabc\r\n0\r\nx-api-key: k\r\n\r\n" + LINE + b"Connection: close\r\n\r\n")
        answers = read(connection)
    assert answers.count(b"HTTP/1.1 200") == 2


def test_a_head_has_its_largest_size_within_one_read_too() -> None:
    async def main() -> None:
        made, written = protocol_of()
        made.data_received(LINE + b"X-Long: " + b"a" * 200_000 + b"\r\n\r\n")
        assert written[0].startswith(b"HTTP/1.1 431")
        made, written = protocol_of()
        made.data_received(LINE + b"X-Many: a\r\n" * 300 + b"\r\n")
        assert written[0].startswith(b"HTTP/1.1 431")
        made, written = protocol_of()
        made.data_received(LINE * 1 + b"Content-Length: 200000\r\n\r\n" + b"a" * 200_000)
        await asyncio.sleep(0.01)
        assert written[0].startswith(b"HTTP/1.1 401"), "a body of one read is no head"

    asyncio.run(main())


def test_requests_sent_ahead_of_their_answers_are_bounded() -> None:
    async def main() -> None:
        made, _ = protocol_of(answered=False)
        made.data_received((LINE + b"\r\n") * 10_000)
        assert len(made.pipeline) <= wire_bounds.MOST_AHEAD
        for task in made.tasks:
            task.cancel()

    asyncio.run(main())


# ---- the end of a connection ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("expects", [b"", b"Expect: 100-continue\r\n"])
def test_who_is_refused_in_the_middle_of_sending_reads_why(server: Server, expects: bytes) -> None:
    size = server.api.config.max_body_bytes + MEGABYTE
    host, _, port = server.url.removeprefix("http://").partition(":")
    for framing in (b"Content-Length: %d" % size, b"Transfer-Encoding: chunked"):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + expects + framing + b"\r\n\r\n")
            if expects and framing.startswith(b"Content"):
                sent = 0  # it waits to be told to go on
            elif framing.startswith(b"Content"):
                sent = send(connection, b"a" * size)
                assert sent == size
            else:
                sent = send(connection, (b"100000\r\n" + b"a" * MEGABYTE + b"\r\n") * (size // MEGABYTE + 2))
            answer = read(connection)
        answer = answer.removeprefix(wire_bounds.CONTINUE)
        assert answer.startswith(b"HTTP/1.1 413"), answer[:100]
        assert b"connection: close" in answer
        assert b"body_too_large" in answer


def test_what_is_dropped_after_an_answer_is_bounded_in_time(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_bounds, "LINGER_TIME", 0.3)
    with socket.create_connection(address) as connection:
        connection.sendall(b"no http\r\n\r\n")
        assert read(connection).startswith(b"HTTP/1.1 400")
        began, taken = time.monotonic(), True
        while taken and time.monotonic() - began < 20:  # by itself it would take all for 30 s
            try:
                connection.send(b"a")
            except OSError:
                taken = False
            time.sleep(0.05)
        assert not taken


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_said_all_gets_its_answer(server: Server, stream: bool) -> None:
    body = b'{"prompt": "def f(", "max_tokens": 8, "temperature": 0, "stream": %s}' % str(stream).lower().encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head + body)
        connection.shutdown(socket.SHUT_WR)
        answer = read(connection, 60).removeprefix(wire_bounds.CONTINUE)
    assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
    assert (b"data: [DONE]" if stream else b'"completion_tokens":8') in answer


@pytest.mark.parametrize("half_first", [False, True])
def test_a_client_that_is_gone_ends_its_request(server: Server, half_first: bool) -> None:
    body = b'{"prompt": "def f(", "max_tokens": 2000, "n": 64, "ignore_eos": true}'  # some 20 s
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    host, _, port = server.url.removeprefix("http://").partition(":")
    assert server.wait_idle()
    stats = asyncio.run_coroutine_threadsafe(server.api.client.ask(), server.loop).result()
    assert stats is not None
    written = stats.counters["generation_tokens"]
    connection = socket.create_connection((host, int(port)))
    connection.sendall(head + body)
    while not server.api.client.num_open:
        time.sleep(0.005)
    if half_first:
        connection.shutdown(socket.SHUT_WR)
        time.sleep(0.2)
        assert server.api.client.num_open, "it only ended its side"
    connection.close()
    began = time.monotonic()
    while server.api.client.num_open and time.monotonic() - began < PATIENCE:
        time.sleep(0.005)
    assert not server.api.client.num_open
    stats = asyncio.run_coroutine_threadsafe(server.api.client.ask(), server.loop).result()
    assert stats is not None
    assert stats.counters["generation_tokens"] - written < 64 * 2000, "it ended by itself"
