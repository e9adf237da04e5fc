"""Runs a program where nothing but one server can be reached, and writes down what it asks of that server.

    unshare --net … python -m tests.serving.clients.apart SOCKET RECORD PORT program …

In a network namespace of its own a program has no interface but the loopback, and there nobody listens but the proxy of
this file. It passes requests on to the server's Unix socket, and writes a line of JSON for each to the file RECORD:
method, path, headers, body, and the answer's status, headers and text.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SIOCSIFFLAGS, IFF_UP = 0x8914, 1
PATIENCE = 110  # seconds for one answer
HOP = {"connection", "transfer-encoding", "keep-alive", "content-length", "host", "accept-encoding", "expect"}


class ToServer(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=PATIENCE)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(self._path)


class Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, server: str, record: Path) -> None:
        self.server, self._record, self._lock = server, record, threading.Lock()
        super().__init__(("127.0.0.1", port), Handler)

    def note(self, **entry: object) -> None:
        with self._lock, self._record.open("a") as file:
            file.write(json.dumps(entry) + "\n")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _pass_on(self) -> None:
        body = self._body()
        upstream = ToServer(self.server.server)
        sent = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
        upstream.request(self.command, self.path, body or None, sent)
        answer = upstream.getresponse()
        self.send_response(answer.status)
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in HOP}
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        parts = []
        try:
            while part := answer.read1(65536):
                parts.append(part)
                self.wfile.write(part)
                self.wfile.flush()
        finally:
            self.close_connection = True
            self.server.note(
                method=self.command,
                path=self.path,
                sent=sent,
                body=body.decode(errors="replace"),
                status=answer.status,
                headers=headers,
                answer=b"".join(parts).decode(errors="replace"),
            )

    do_GET = do_POST = do_HEAD = do_DELETE = do_PUT = _pass_on

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the record says it."""


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))


def main(server: str, record: str, port: str, *program: str) -> int:
    with suppress(PermissionError):  # not in a namespace of its own: the loopback is up
        raise_loopback()
    proxy = Proxy(int(port), server, Path(record))
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    return subprocess.run(program, stdin=subprocess.DEVNULL, env=os.environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
