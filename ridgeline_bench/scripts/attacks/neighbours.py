"""The effect of one client's requests, orders and clocks on other clients, on the embedded models.

    python -m ridgeline_bench.scripts.attacks.neighbours [ATTACK …] [--out FILE]

flood        One key sends 500 requests; another key waits for its first token.
several      Two models in turn, one of them with 200 requests; a request to the other.
sleep        The engine is sent to sleep and woken six times under load.
kv8          A cache of 8 bits, and 200 streams of which each is cut at a random moment.
clock        The wall clock of all processes jumps an hour, and back.
descriptors  An API server may open no more files for a while.
stopped      SIGSTOP of one of two API servers, and SIGCONT.
grpc         Oversized messages, metadata that are garbage, and streams that are abandoned.
pictures     Files that unpack to a gigabyte, lie about their size or are cut, from 16 connections; another client's
             stream of text, and the longest wait for one of its tokens. The most processor time that the event loop
             spent between two moments at which it was free, and all threads of the engine in one step.
bodies       Pictures in base64 that make bodies of 16 MB, one after the other; the same stream beside them, and the
             most processor time that the server's event loop spent between two moments at which it was free.

Waits in a quiet window of the same server, right before, stand beside those under attack: cores are shared.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import random
import resource
import signal
import socket as sockets
import time
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import grpc as protocol
import numpy as np
from PIL import Image

from ridgeline.serving.grpc.proto.ridgeline.v1 import inference_pb2, inference_pb2_grpc
from ridgeline.weights.folder import ASSETS, EMBEDDED_MODEL
from ridgeline_bench.scripts.attacks.processes import SMALL, Row, Watch, counted, environment, main, post
from ridgeline_bench.scripts.served import Served, resident

QUIET = 2.0  # seconds of a quiet window
PATH = "/v1/completions"
LONG = SMALL | {"max_tokens": 64}
JUMP = """
import os, time
_real = time.time
time.time = lambda: _real() + (3600.0 if os.path.exists(os.environ["CLOCK_JUMPS"]) else 0.0)
"""
BEATS = """
import os, sys
if "api_server_process" in " ".join(sys.orig_argv):
    import asyncio, time, uvicorn
    serve = uvicorn.Server.serve
    async def beat():
        with open(os.environ["BEATS"], "a", buffering=1) as told:
            while True:
                before = time.thread_time()
                await asyncio.sleep(0.002)
                told.write(f"{time.thread_time() - before:.4f}\\n")
    async def watched(self, *given):
        self.beat = asyncio.get_running_loop().create_task(beat())
        await serve(self, *given)
    uvicorn.Server.serve = watched
if "engine_process" in " ".join(sys.orig_argv):
    import time
    from ridgeline.engine.engine import Engine
    step, steps = Engine.step, open(os.environ["BEATS"] + "-steps", "a", buffering=1)
    def timed(self):
        before = time.process_time()
        found = step(self)
        steps.write(f"{time.process_time() - before:.4f}\\n")
        return found
    Engine.step = timed
"""


class Compared(Watch):
    """A watch that looks at the quiet server first, and tells both waits and how the API server grew."""

    def __init__(self, server: Served, row: Row) -> None:
        with Watch(server) as before:
            time.sleep(QUIET)
        self._quiet, self._row, self._face = before.worst, row, server.api_servers[0]
        self._before = resident(self._face)
        super().__init__(server)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        row = self._row
        row.worst_health, row.memory = self.worst, max(row.memory, self.memory)
        grown = f"API server {self._before >> 20} to {resident(self._face) >> 20} MiB"
        row.happened.append(
            f"/health/live at most {self._quiet:.3f} s before, {self.worst:.3f} s under attack; {grown}"
        )


def storm(server: Served, body: dict[str, Any], count: int, key: str = "", threads: int = 64) -> str:
    with ThreadPoolExecutor(threads) as pool:
        return counted([status for status, _, _ in pool.map(lambda _: post(server, PATH, body, key), range(count))])


def flood(row: Row, folder: Path) -> None:
    one = SMALL | {"max_tokens": 1}
    with Served("--api-key", "mallory", "--api-key", "alice") as server:
        post(server, PATH, one, "alice")
        quiet = max(post(server, PATH, one, "alice")[2] for _ in range(5))
        with Compared(server, row), ThreadPoolExecutor(1) as pool:
            theirs = pool.submit(storm, server, LONG, 500, "mallory", 256)
            time.sleep(0.5)
            mine = [post(server, PATH, one, "alice") for _ in range(10)]
            worst = max(seconds for _, _, seconds in mine)
            row.happened.append(f"first token of the other key: {quiet:.3f} s before, {worst:.3f} s beside the flood")
            row.happened.append(f"other key: {counted([status for status, _, _ in mine])}; flood: {theirs.result()}")


def several(row: Row, folder: Path) -> None:
    models = (f"large={EMBEDDED_MODEL}", f"small={EMBEDDED_MODEL.with_name('embedded-draft')}", "--model-turn", "0.5")
    with Served(*models) as server:
        quiet = max(post(server, PATH, SMALL | {"model": "small"})[2] for _ in range(3))
        with Compared(server, row), ThreadPoolExecutor(1) as pool:
            theirs = pool.submit(storm, server, LONG | {"model": "large"}, 200)
            time.sleep(0.5)
            status, _, seconds = post(server, PATH, SMALL | {"model": "small"})
            row.happened.append(f"the other model: {status}, {quiet:.2f} s before, {seconds:.2f} s beside the storm")
            row.happened.append(f"storm: {theirs.result()}")


def sleep(row: Row, folder: Path) -> None:
    with Served("--open-admin-routes") as server:
        post(server, PATH, SMALL)
        with Compared(server, row), ThreadPoolExecutor(1) as pool:
            theirs = pool.submit(storm, server, LONG, 200, "", 16)
            orders = [post(server, path, {})[0] for _ in range(6) for path in ("/sleep?mode=keep", "/wake_up")]
            row.happened.append(f"orders: {counted(orders)}; requests: {theirs.result()}; {_left(server)}")


def kv8(row: Row, folder: Path) -> None:
    draw = random.Random(0)
    moments = [draw.random() * 0.3 for _ in range(200)]
    with Served("--kv-cache-dtype", "int8") as server:
        post(server, PATH, SMALL)
        host, _, port = server.url.removeprefix("http://").partition(":")

        def cut(moment: float) -> None:
            body = b'{"prompt": "def f(", "max_tokens": 400, "stream": true, "ignore_eos": true}'
            head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            with sockets.create_connection((host, int(port)), timeout=30) as connection:
                connection.sendall(head + body)
                time.sleep(moment)

        with Compared(server, row), ThreadPoolExecutor(16) as pool:
            list(pool.map(cut, moments))
            row.happened.append(f"200 streams cut; {_left(server)}; then {post(server, PATH, SMALL)[0]}")


def clock(row: Row, folder: Path) -> None:
    (folder / "sitecustomize.py").write_text(JUMP)
    flag, path = folder / "jumps", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with environment(CLOCK_JUMPS=str(flag), PYTHONPATH=path), Served() as server:
        post(server, PATH, SMALL)
        engine = server.engine
        with Compared(server, row), ThreadPoolExecutor(1) as pool:
            theirs = pool.submit(storm, server, LONG, 60, "", 8)
            for _ in range(4):
                time.sleep(0.5)
                flag.unlink() if flag.exists() else flag.touch()
            same = "the same" if server.engine == engine else "ANOTHER ONE"
            row.happened.append(f"requests: {theirs.result()}; the engine is {same}; {_left(server)}")


def descriptors(row: Row, folder: Path) -> None:
    with Served() as server:
        post(server, PATH, SMALL)
        face = server.api_servers[0]
        limits = resource.prlimit(face, resource.RLIMIT_NOFILE)
        with Compared(server, row):
            used = len(os.listdir(f"/proc/{face}/fd"))
            resource.prlimit(face, resource.RLIMIT_NOFILE, (used + 4, limits[1]))
            host, _, port = server.url.removeprefix("http://").partition(":")
            held = [sockets.create_connection((host, int(port)), timeout=10) for _ in range(32)]
            time.sleep(2)
            for each in held:
                each.close()
            resource.prlimit(face, resource.RLIMIT_NOFILE, limits)
            row.happened.append(
                f"32 connections, 4 descriptors; given back: {storm(server, SMALL, 20)}; {_left(server)}"
            )
            row.happened.append("the API server is " + ("the same" if server.api_servers == [face] else "ANOTHER ONE"))


def stopped(row: Row, folder: Path) -> None:
    with Served("--api-server-count", "2") as server:
        post(server, PATH, SMALL)
        victim, before = server.api_servers[1], server.api_servers
        os.kill(victim, signal.SIGSTOP)
        began = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            asked = list(pool.map(lambda _: server.get("/health/live")[0], range(16)))
        row.happened.append(
            f"one of two stopped: {counted(asked)} in {time.monotonic() - began:.1f} s (0: none in 10 s)"
        )
        if victim in server.api_servers:
            os.kill(victim, signal.SIGCONT)
        time.sleep(1)
        kept = "the same two" if server.api_servers == before else f"{server.api_servers}, were {before}"
        row.happened.append(f"continued: {storm(server, SMALL, 20)}; the API servers are {kept}")


def grpc(row: Row, folder: Path) -> None:
    with sockets.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with Served("--grpc-port", str(port)) as server:
        options = [("grpc.max_send_message_length", -1)]
        channel = protocol.insecure_channel(f"127.0.0.1:{port}", options)
        stub = inference_pb2_grpc.InferenceStub(channel)

        def ask(text: str, metadata: Any = (), most: int = 4, read: int = 1 << 20) -> str:
            sampling = inference_pb2.Sampling(max_tokens=most, ignore_eos=True)
            call = stub.Generate(
                inference_pb2.GenerateRequest(text=text, sampling=sampling), metadata=metadata, timeout=60
            )
            try:
                for _, _piece in zip(range(read), call, strict=False):
                    pass
                call.cancel()
            except protocol.RpcError as error:
                return str(error.code().name)
            return "OK"

        def send(message: bytes) -> str:
            """Send a message as it is: making it here would hold this process's lock, and the look at /health waits."""
            try:
                return (
                    f"{len(list(channel.unary_stream('/ridgeline.v1.Inference/Generate')(message, timeout=60)))} pieces"
                )
            except protocol.RpcError as error:
                return str(error.code().name)

        ask("x")
        message = inference_pb2.GenerateRequest(text="x" * (40 << 20)).SerializeToString()
        with Compared(server, row), ThreadPoolExecutor(16) as pool:
            large = [send(message) for _ in range(4)]
            garbage = [(("x-bin", os.urandom(1000)), ("authorization", "Bearer " + "a" * 3000)) for _ in range(50)]
            odd = list(pool.map(lambda metadata: ask("x", metadata), garbage))
            left = list(pool.map(lambda number: ask("def f(", most=400, read=number % 3), range(200)))
            row.happened.append(f"40 MB: {_named(large)}; metadata: {_named(odd)}; 200 abandoned: {_named(left)}")
            row.happened.append(f"{_left(server)}; then {ask('x')}")
        channel.close()


def pictures(row: Row, folder: Path) -> None:
    content = [
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(file).decode()}}]
        for file in hostile_pictures()
    ]
    bodies = [{"max_tokens": 1, "messages": [{"role": "user", "content": each}]} for each in content]
    (folder / "sitecustomize.py").write_text(BEATS)
    told, path = folder / "beats", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    steps = told.with_name(told.name + "-steps")
    with environment(BEATS=str(told), PYTHONPATH=path), Served("--model", str(ASSETS / "embedded-vision")) as server:
        post(server, "/v1/chat/completions", bodies[0])
        quiet, before = longest_gap(server), (told.stat().st_size, steps.stat().st_size)
        with Compared(server, row), ThreadPoolExecutor(16) as pool:
            theirs = [pool.submit(post, server, "/v1/chat/completions", bodies[n % len(bodies)]) for n in range(36)]
            time.sleep(0.2)
            gaps = [longest_gap(server)]
            while not all(each.done() for each in theirs):
                gaps.append(longest_gap(server))
            answers = counted([each.result()[0] for each in theirs])
        row.happened.append(f"a stream's longest wait: {quiet:.3f} s before, {max(gaps):.3f} s beside the files")
        row.happened.append(f"files: {answers}; {_left(server)}")
        loop, engine = (
            max(map(float, each.read_bytes()[at:].split())) for each, at in zip((told, steps), before, strict=True)
        )
        row.happened.append(f"processor time: the loop's most {loop:.4f} s, the engine's dearest step {engine:.4f} s")


def bodies(row: Row, folder: Path) -> None:
    (folder / "sitecustomize.py").write_text(BEATS)
    noise, told = BytesIO(), folder / "beats"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (2048, 2048, 3), dtype=np.uint8)).save(noise, "PNG")
    url = "data:image/png;base64," + base64.b64encode(noise.getvalue()).decode()
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    large = {"max_tokens": 1, "messages": [message]}
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with environment(BEATS=str(told), PYTHONPATH=path), Served("--model", str(ASSETS / "embedded-vision")) as server:
        longest_gap(server)
        quiet = [longest_gap(server) for _ in range(4)]
        before = told.stat().st_size
        with Compared(server, row), ThreadPoolExecutor(1) as pool:
            theirs = pool.submit(lambda: [post(server, "/v1/chat/completions", large)[0] for _ in range(8)])
            gaps = list[float]()
            while not theirs.done():
                gaps.append(longest_gap(server))
        held = [float(each) for each in told.read_bytes()[before:].split()]
    row.happened.append(
        f"{counted(theirs.result())} to bodies of {len(url) / 1e6:.1f} MB; the loop's most {max(held):.4f} s"
    )
    row.happened.append(
        f"a stream's longest wait: {max(quiet):.3f} s before, {max(gaps):.3f} s beside them, median of "
        f"{len(gaps)} streams {float(np.median(gaps)):.3f} s"
    )


def hostile_pictures() -> list[bytes]:
    """Return files of pictures: at the bound of pixels, beyond it, cut, of many scans, and of noise."""
    draw, whole = np.random.default_rng(0), BytesIO()
    Image.new("RGB", (8192, 8192)).save(whole, "PNG")
    noise, scans = BytesIO(), BytesIO()
    Image.fromarray(draw.integers(0, 256, (2048, 2048, 3), dtype=np.uint8)).save(noise, "PNG", compress_level=1)
    Image.new("RGB", (8000, 8000)).save(scans, "JPEG", progressive=True)
    claims = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + b"\0\x01\0\0" * 2 + b"\x08\2\0\0\0" + bytes(64)
    return [whole.getvalue(), claims, noise.getvalue(), noise.getvalue()[:-9], scans.getvalue(), draw.bytes(4 << 20)]


def longest_gap(server: Served) -> float:
    """Return the seconds that a client waited for a token of a stream of text at the most, the first one apart."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    body = json.dumps({"prompt": "A", "max_tokens": 64, "stream": True, "ignore_eos": True})
    connection, gaps = http.client.HTTPConnection(host, int(port), timeout=60), list[float]()
    connection.request("POST", PATH, body, {"Content-Type": "application/json"})
    answer, before = connection.getresponse(), 0.0
    while line := answer.readline():
        if line.startswith(b"data: {"):
            now = time.monotonic()
            gaps += [now - before] if before else []
            before = now
    connection.close()
    return max(gaps)


def _named(words: list[str]) -> str:
    return ", ".join(f"{words.count(word)} x {word}" for word in sorted(set(words)))


def _left(server: Served) -> str:
    """Return the work that the server still has after some seconds to finish it, in words."""
    began = time.monotonic()
    while (busy := server.busy()) and time.monotonic() - began < 20:
        time.sleep(0.2)
    return "nothing is left" if not busy else f"LEFT OVER: {busy:g}"


ATTACKS = {
    each.__name__: each for each in (flood, several, sleep, kv8, clock, descriptors, stopped, grpc, pictures, bodies)
}

if __name__ == "__main__":
    main(ATTACKS, __doc__)
