"""The cost of the network: the same streams through HTTP, gRPC, and no API server at all.

    python benchmarks/serving_api_servers.py [--streams 64] [--tokens 128] [--repeats 3]

HTTP and gRPC are measured with a server on the embedded model and a client in a process of its own. "service" is the
inside of an API server (admission, wire, text) without HTTP or gRPC; it runs in the client's process, on an engine of
its own. The figures are the tokens per second of all streams together, the median of the repeats, which take turns; and
the processor time that the API server spent on a token, which tells more on a machine that others use.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import grpc
import uvloop

from ridgeline.bench.serving.client import Address, Client
from ridgeline.core.plan.request import SamplingParams
from ridgeline.core.settings.serving import NamedModel, ServeConfig
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.generation.service import GenerationRequest
from ridgeline.serving.grpc.proto.ridgeline.v1 import inference_pb2 as pb
from ridgeline.serving.grpc.proto.ridgeline.v1 import inference_pb2_grpc
from ridgeline.weights.folder import EMBEDDED_MODEL

PROMPT = list(range(100, 132))
READY = 60.0  # seconds


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def server() -> Iterator[tuple[int, int, int]]:
    """Start a server. Yields its process id and its ports of HTTP and gRPC."""
    ports = free_port(), free_port()
    flags = ["--port", str(ports[0]), "--grpc-port", str(ports[1]), "--no-access-log", "--log-level", "warning"]
    process = subprocess.Popen([sys.executable, "-m", "ridgeline", "serve", *flags])
    try:
        for port in ports:
            deadline = time.monotonic() + READY
            while socket.socket().connect_ex(("127.0.0.1", port)):
                if time.monotonic() > deadline or process.poll() is not None:
                    sys.exit("the server did not start.")
                time.sleep(0.1)
        time.sleep(3)
        yield process.pid, *ports
    finally:
        process.terminate()
        process.wait()


async def over_http(port: int, streams: int, tokens: int) -> None:
    client = Client(Address.of(f"http://127.0.0.1:{port}"), {})
    body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    request = client.encode("/v1/completions", json.dumps(body).encode())
    events = 0

    def count(data: bytes, _: float) -> None:
        nonlocal events
        events += data.count(b"\n\n")

    answers = await asyncio.gather(*(client.send(request, count) for _ in range(streams)))
    wrong = [answer for answer in answers if answer.status != 200]
    assert not wrong, wrong[0]
    assert events >= streams, "no stream"


async def over_grpc(port: int, streams: int, tokens: int) -> None:
    sampling = pb.Sampling(max_tokens=tokens, temperature=0, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def one() -> int:
            return sum([len(each.piece.token_ids) async for each in stub.Generate(request)])

        assert sum(await asyncio.gather(*(one() for _ in range(streams)))) == streams * tokens


async def through_service(api: ApiServer, streams: int, tokens: int) -> None:
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)

    async def one() -> int:
        async with api.service.run(GenerationRequest(id="x", prompt_token_ids=PROMPT, params=params)) as run:
            return len((await run.finish()).outputs[0].token_ids)

    assert sum(await asyncio.gather(*(one() for _ in range(streams)))) == streams * tokens


def processor_time(pid: int) -> float:
    """Return the processor time that a process has used so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def api_server_of(server: int) -> int:
    """Return the process id of the server's one API server."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return next(int(pid) for pid in children if "api_server_process" in Path(f"/proc/{pid}/cmdline").read_text())


@contextlib.asynccontextmanager
async def bare_api_server() -> AsyncIterator[ApiServer]:
    """Run an API server's service in this process, with an engine in another process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "socket"
        engine = subprocess.Popen(
            [sys.executable, "-m", "ridgeline.serving.processes.engine_process"], stdin=subprocess.PIPE
        )
        assert engine.stdin is not None
        engine.stdin.write(json.dumps({"socket": str(path), "options": {}, "served_name": "x"}).encode() + b"\n")
        engine.stdin.flush()
        api = ApiServer.build(ServeConfig(), NamedModel(str(EMBEDDED_MODEL), ("x",), (str(path),)), "bench")
        listening = asyncio.create_task(api.client.run())
        await api.client.wait_until_up()
        try:
            yield api
        finally:
            listening.cancel()
            engine.kill()
            engine.wait()


async def measure(streams: int, tokens: int, repeats: int) -> None:
    with server() as (pid, http, rpc):
        async with bare_api_server() as api:
            works: dict[str, tuple[Callable[[], Awaitable[None]], int]] = {
                "service": (lambda: through_service(api, streams, tokens), os.getpid()),
                "http": (lambda: over_http(http, streams, tokens), api_server_of(pid)),
                "grpc": (lambda: over_grpc(rpc, streams, tokens), api_server_of(pid)),
            }
            rates: dict[str, list[float]] = {name: [] for name in works}
            spent: dict[str, list[float]] = {name: [] for name in works}
            for _ in range(repeats + 1):
                for name, (work, process) in works.items():
                    began, worked = time.monotonic(), processor_time(process)
                    await work()
                    rates[name].append(streams * tokens / (time.monotonic() - began))
                    spent[name].append(1e6 * (processor_time(process) - worked) / (streams * tokens))
    for name in works:
        rate, cost = statistics.median(rates[name][1:]), statistics.median(spent[name][1:])
        low, high = min(rates[name][1:]), max(rates[name][1:])
        print(f"{name:8} {rate:7.0f} tokens/s ({low:.0f} to {high:.0f})   {cost:4.0f} µs of the API server a token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    uvloop.run(measure(given.streams, given.tokens, given.repeats))


if __name__ == "__main__":
    main()
