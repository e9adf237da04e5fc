"""Connections that never come to the point, against a real uvicorn."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from ridgeline.serving.http import protocol
from ridgeline.serving.http.protocol import LARGEST_HEAD, BoundedProtocol

LINE = b"GET / HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """Of a server whose answer is the length of the body, and that waits 1 s for heads."""
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT", 1.0)

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


def read(connection: socket.socket) -> bytes:
    """Until the server closes the connection."""
    connection.settimeout(120)
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
                answer += connection.recv(1 << 16)
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
