"""The cost of receiving 300 streams: our thin client, aiohttp and httpx on the same server.

    python -m ridgeline_bench.scripts.http_clients [--streams 300] [--tokens 100] [--gap 0.05]

The server, a process of its own, writes a token to every stream each `gap` seconds. A client's figures are the
processor time that it used per 1000 tokens, its share of a core, and how far its intervals between tokens are from
`gap`, an error that it would blame on the server. Clients that are not installed are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

from ridgeline_bench.child import percentile
from ridgeline_bench.serving.client import Address, Client
from ridgeline_bench.serving.stream import Stream

BODY = json.dumps({"prompt": [1] * 64, "stream": True}).encode()


async def serve(port: int, tokens: int, gap: float) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        sizes = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        await reader.readexactly(int(sizes[0].split(b":")[1]))
        kind = b"content-type: text/event-stream\r\ntransfer-encoding: chunked"
        writer.write(b"HTTP/1.1 200 OK\r\n" + kind + b"\r\n\r\n")
        due = time.monotonic()
        for n in range(tokens):
            due += gap
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            event = {"choices": [{"index": 0, "text": " a"}], "usage": {"completion_tokens": n + 1}}
            data = f"data: {json.dumps(event)}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", port, backlog=2048)
    print("up", flush=True)
    await server.serve_forever()


async def thin(url: str, streams: list[Stream]) -> None:
    client = Client(Address.of(url), {})
    request = client.encode("/v1/completions", BODY)
    await asyncio.gather(*(client.send(request, stream.feed) for stream in streams))


async def aiohttp(url: str, streams: list[Stream]) -> None:
    import aiohttp as library

    async with library.ClientSession(connector=library.TCPConnector(limit=0)) as session:

        async def one(stream: Stream) -> None:
            async with session.post(url + "/v1/completions", data=BODY) as answer:
                async for data in answer.content.iter_any():
                    stream.feed(data, time.monotonic())

        await asyncio.gather(*map(one, streams))


async def httpx(url: str, streams: list[Stream]) -> None:
    import httpx as library

    limits = library.Limits(max_connections=None, max_keepalive_connections=None)
    async with library.AsyncClient(limits=limits, timeout=None) as session:

        async def one(stream: Stream) -> None:
            async with session.stream("POST", url + "/v1/completions", content=BODY) as answer:
                async for data in answer.aiter_raw():
                    stream.feed(data, time.monotonic())

        await asyncio.gather(*map(one, streams))


CLIENTS: dict[str, Callable[[str, list[Stream]], Awaitable[None]]] = {"thin": thin, "aiohttp": aiohttp, "httpx": httpx}


async def measure(name: str, url: str, count: int, gap: float) -> None:
    streams = [Stream() for _ in range(count)]
    began, worked = time.monotonic(), time.process_time()
    try:
        await CLIENTS[name](url, streams)
    except ImportError:
        return
    used, took = time.process_time() - worked, time.monotonic() - began
    gaps = [b - a for s in streams for a, b in zip(s.moments, s.moments[1:], strict=False)]
    off = [1e3 * abs(g - gap) for g in gaps]
    tokens = sum(s.output_tokens for s in streams)
    print(
        f"{name:8} {1e6 * used / tokens:6.0f} µs a token  {100 * used / took:4.0f} % of a core  "
        f"off by p50 {percentile(off, 50):.2f} p99 {percentile(off, 99):.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--gap", type=float, default=0.05)
    parser.add_argument("--port", type=int, default=18_998)
    parser.add_argument("--serve", action="store_true", help="only be the server")
    given = parser.parse_args()
    import uvloop

    if given.serve:
        uvloop.run(serve(given.port, given.tokens, given.gap))
    command = [sys.executable, __file__, "--serve", *sys.argv[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        for name in CLIENTS:
            uvloop.run(measure(name, f"http://127.0.0.1:{given.port}", given.streams, given.gap))
        server.kill()


if __name__ == "__main__":
    main()
