"""A server that does exactly as each prompt says, and notes when it did so: the oracle of what a client measured.

A prompt is JSON: `status` (default 200); `wait`, seconds until the first piece; `pieces`, a list of (tokens, seconds
until the next); `counts`: "running" usage, token "ids", "final" usage or "none"; `end`: "done", "cut" (the connection
breaks), "undone" (the body ends without [DONE]), "error", "nonsense", "stall" or "unframed" (neither length nor
chunks).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Seen:
    """One request: its body, when it was read, and when each piece was written (monotonic clock)."""

    body: dict[str, Any]
    arrived: float
    headers: str
    written: list[float] = field(default_factory=list)


class ScriptedServer:
    """`with ScriptedServer() as server: server.url`. Its loop runs in a thread."""

    def __init__(
        self, vocab_size: int = 1000, max_model_len: int = 4096, port: int = 0, model: str = "scripted"
    ) -> None:
        self.seen: list[Seen] = []
        self.connections = self.open_now = self.most_open = 0
        self.default: dict[str, Any] = {"wait": 0.0, "pieces": [(1, 0.0)]}
        self._facts = {
            "/v1/models": {"data": [{"id": model, "owned_by": "test", "max_model_len": max_model_len}]},
            "/health": {"status": "ok"},
            "/version": {"version": "7"},
            "/tokenizer_info": {"vocab_size": vocab_size} if vocab_size else {},
        }
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run)
        self._up = threading.Event()
        self.url = ""

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        assert self._up.wait(120)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop listening. A second call does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", self._port, backlog=512)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._up.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while await self._exchange(reader, writer):
                pass
        writer.close()
        self._tasks.discard(task)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; whether another may follow on the connection."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, route, _ = head.split(" ", 2)
        if method == "GET":
            _answer(writer, 200 if self._facts.get(route) else 404, self._facts.get(route, {}))
            return False
        size = next(line for line in head.lower().split("\r\n") if line.startswith("content-length:"))
        body = json.loads(await reader.readexactly(int(size.partition(":")[2])))
        seen = Seen(body, time.monotonic(), head)
        self.seen.append(seen)
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        try:
            return await self._play(self._script(body), seen, writer)
        finally:
            self.open_now -= 1

    def _script(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body.get("prompt") or body["messages"][-1]["content"]
        return json.loads(prompt) if isinstance(prompt, str) and prompt.startswith("{") else self.default

    async def _play(self, script: dict[str, Any], seen: Seen, writer: asyncio.StreamWriter) -> bool:
        if (status := script.get("status", 200)) != 200:
            _answer(writer, status, {"error": {"message": f"scripted {status}"}})
            return True
        end, counts = script.get("end", "done"), script.get("counts", "running")
        framed = end != "unframed"
        frame = b"Transfer-Encoding: chunked\r\n" if framed else b"Connection: close\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + frame + b"\r\n")

        def write(data: bytes) -> None:
            writer.write(b"%x\r\n%s\r\n" % (len(data), data) if framed else data)

        total, due = 0, seen.arrived + script.get("wait", 0.0)
        write(b": keep-alive\n\n")
        for tokens, gap in script.get("pieces", []):
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            total += tokens
            event: dict[str, Any] = {"choices": [{"index": 0, "text": "a" * tokens}]}
            if counts == "running":
                event["usage"] = _usage(total)
            if counts == "ids":
                event["choices"][0]["token_ids"] = [0] * tokens
            write(b"data: " + json.dumps(event).encode() + b"\n\n")
            seen.written.append(time.monotonic())
            due += gap
        if end == "stall":
            await asyncio.sleep(60)
        if end == "cut":
            writer.transport.abort()
            return False
        if end == "error":
            write(b'data: {"error": {"message": "scripted failure"}}\n\n')
        if end == "nonsense":
            write(b"data: {not json\n\n")
        if counts in ("running", "final"):
            write(b"data: " + json.dumps({"choices": [], "usage": _usage(total)}).encode() + b"\n\n")
        if end in ("done", "unframed"):
            write(b"data: [DONE]\n\n")
        if framed:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return framed


def _usage(total: int) -> dict[str, Any]:
    return {"prompt_tokens": 10, "completion_tokens": total, "prompt_tokens_details": {"cached_tokens": 4}}


def _answer(writer: asyncio.StreamWriter, status: int, value: dict[str, Any]) -> None:
    body = json.dumps(value).encode()
    writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
