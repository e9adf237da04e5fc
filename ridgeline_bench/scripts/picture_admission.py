"""How long a server takes to read chats with a picture, from the last byte of their bodies, at hundreds of clients.

    python -m ridgeline_bench.scripts.picture_admission [--clients 256] [--rates 20 40 80] [--seconds 4]
        [--windows 5] [--side 64] [--servers 1] [--output FILE.jsonl]

A server with the embedded model that sees is started. Each client has a connection, and has sent all of its body but
the last byte. Clients' last bytes come at random (Poisson), `rate` of them a second in all, and a client is asked again
once it has its answer. What is asked is the length of the prompt (POST /v1/messages/count_tokens), for which a server
does all that it does before the engine gets a request: it reads the JSON, decodes the picture, fills in the template,
tokenizes, and places vectors. Times are of the clock, in ms, and of the whole answer:

    text      the same chat without its picture
    picture   with a PNG file of random pixels, another one each time

Both kinds take turns, and `decoding` is the least time of the pool of processes for such a file, from outside of the
server. Other programs share the cores, and so does this one. So each rate has some windows, and those with the median
and the least p99 of text are told. A further line is computed, so that other programs do not matter: --alone requests
of each kind come one by one, and the kernel tells the processor time of all of the API server's threads for each. These
times are drawn at random for requests that come at random, run one after the other, and wait for those before them.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ridgeline.media.pool import Decoders
from ridgeline.weights.folder import ASSETS
from ridgeline_bench.scripts.asked import asked, check_counts, keep, told
from ridgeline_bench.scripts.served import Served

PATH = "/v1/messages/count_tokens"
KINDS = ("text", "picture")
PATIENCE = 60.0  # seconds for one answer
FURTHER = (100.0, 150.0, 200.0, 300.0)  # requests a second, in computed lines alone
DRAWN = 100_000  # requests of a computed line


def png(number: int, side: int) -> bytes:
    """Return a PNG file of random pixels."""
    pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def request(kind: str, file: bytes) -> bytes:
    """Return a request over HTTP."""
    content: list[dict[str, Any]] = [{"type": "text", "text": "What is in the picture?"}]
    if kind == "picture":
        data = base64.b64encode(file).decode()
        content.insert(0, {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}})
    body = json.dumps({"model": "seen", "messages": [{"role": "user", "content": content}]}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Client:
    """A connection, on which a request waits for its last byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self._last, self.kind = reader, writer, b"", ""

    async def prepare(self, kind: str, file: bytes) -> None:
        data = request(kind, file)
        self.kind, self._last = kind, data[-1:]
        self._writer.write(data[:-1])
        await self._writer.drain()

    async def finish(self) -> float:
        """Send the last byte, and return the milliseconds until the answer is there. Raise RuntimeError for errors."""
        began = time.perf_counter()
        self._writer.write(self._last)
        head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), PATIENCE)
        fields = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:] if ": " in line)
        body = await self._reader.readexactly(int(fields["content-length"]))
        took = 1e3 * (time.perf_counter() - began)
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the server answered {body[:300]!r}")
        return took

    def close(self) -> None:
        self._writer.close()


async def load(url: str, clients: int, rate: float, seconds: float, side: int) -> dict[str, list[float]]:
    """Return the times of both kinds."""
    host, _, port = url.removeprefix("http://").partition(":")
    idle: asyncio.Queue[Client] = asyncio.Queue()
    every = [Client(*await asyncio.open_connection(host, int(port))) for _ in range(clients)]
    files, count = [png(number, side) for number in range(64)], 0
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}

    async def ready(client: Client) -> None:
        nonlocal count
        count += 1
        file = bytearray(files[count // 2 % len(files)])
        await client.prepare(KINDS[count % 2], bytes(file))
        idle.put_nowait(client)

    async def one(client: Client) -> None:
        found[client.kind].append(await client.finish())
        await ready(client)

    for client in every:
        await ready(client)
    gaps = np.random.default_rng(0).exponential(1 / rate, int(rate * seconds))
    moments, running = time.perf_counter() + np.cumsum(gaps), list[asyncio.Task[None]]()
    for moment in moments:
        await asyncio.sleep(max(0.0, moment - time.perf_counter()))
        running.append(asyncio.create_task(one(await idle.get())))
    await asyncio.gather(*running)
    for client in every:
        client.close()
    return found


def processor_ms(process: int) -> float:
    """Return the milliseconds that all threads of a process have run."""
    tasks = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in tasks) / 1e6


async def alone(url: str, process: int, count: int, side: int) -> dict[str, np.ndarray]:
    """Return the milliseconds of processor time of `count` requests of each kind, one by one."""
    host, _, port = url.removeprefix("http://").partition(":")
    client = Client(*await asyncio.open_connection(host, int(port)))
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(2 * count):
        await client.prepare(KINDS[number % 2], png(number, side))
        await asyncio.sleep(0.02)  # until the server has read all but the last byte
        before = processor_ms(process)
        await client.finish()
        found[client.kind].append(processor_ms(process) - before)
    client.close()
    return {kind: np.array(times) for kind, times in found.items()}


def queued(spent: dict[str, np.ndarray], rate: float, seed: int = 0) -> dict[str, np.ndarray]:
    """Return the milliseconds from last bytes to answers of both kinds, if requests come at random, `rate` a second,
    and take such times one after the other."""
    draw = np.random.default_rng(seed)
    kind, gaps = draw.integers(0, len(KINDS), DRAWN), draw.exponential(1e3 / rate, DRAWN)
    took = np.choose(kind, [draw.choice(spent[each], DRAWN) for each in KINDS])
    ahead = np.cumsum(took - np.append(gaps[1:], 0))  # of work that came over time that passed
    before = np.append(0, ahead[:-1])
    waits = before - np.minimum.accumulate(before)
    return {each: (waits + took)[kind == number] for number, each in enumerate(KINDS)}


def decoding(side: int) -> float:
    """Return the milliseconds of the pool for a file."""
    decoders, least = Decoders(processes=1), float("inf")
    for number in range(20):
        file, began = png(number, side), time.perf_counter()
        decoders.picture(file)
        least = min(least, time.perf_counter() - began)
    return 1e3 * least


def main() -> None:
    a = asked(
        __doc__, clients=256, rates=[20.0, 40.0, 80.0], seconds=4.0, windows=5, side=64, servers=1, alone=200, output=""
    )
    with told():
        check_counts(a, "clients", "side", "servers", "windows", "alone")
    least = decoding(a.side)
    arguments = (
        "--model",
        str(ASSETS / "embedded-vision"),
        "--served-model-name",
        "seen",
        "--api-server-count",
        str(a.servers),
    )
    with Served(*arguments) as server:
        asyncio.run(load(server.url, 8, 20, 2, a.side))  # processes start, and templates are compiled
        for rate in a.rates:
            found = [asyncio.run(load(server.url, a.clients, rate, a.seconds, a.side)) for _ in range(a.windows)]
            found.sort(key=lambda each: float(np.quantile(each["text"], 0.99)))
            for window, times in (("least", found[0]), ("median", found[len(found) // 2])):
                line: dict[str, Any] = {"what": "picture admission", "clients": a.clients, "rate": rate}
                line |= {"side": a.side, "servers": a.servers, "decoding_ms": round(least, 2), "window": window}
                tell(line, times, a.output)
        spent = asyncio.run(alone(server.url, server.api_servers[0], a.alone, a.side))
    most = 2e3 / sum(float(each.mean()) for each in spent.values())
    for rate in (each for each in (*a.rates, *FURTHER) if each < most):
        line = {"what": "picture admission", "rate": rate, "side": a.side, "servers": 1, "window": "computed"}
        line |= {f"{kind}_processor_ms": round(float(times.mean()), 2) for kind, times in spent.items()}
        tell(line, {kind: each.tolist() for kind, each in queued(spent, rate).items()}, a.output)


def tell(line: dict[str, Any], times: dict[str, list[float]], output: str) -> None:
    """Print and store a line with the quantiles of both kinds."""
    line |= {name: round(value, 2) for kind in KINDS for name, value in quantiles(kind, times[kind])}
    print(" ".join(f"{name}={value}" for name, value in line.items()), flush=True)
    keep(Path(output) if output else None, line)


def quantiles(kind: str, times: list[float]) -> Iterator[tuple[str, float]]:
    """Yield the names and figures of a kind of request, in ms."""
    for name, part in (("p50", 0.5), ("p99", 0.99)):
        yield f"{kind}_{name}_ms", float(np.quantile(times, part))


if __name__ == "__main__":
    main()
