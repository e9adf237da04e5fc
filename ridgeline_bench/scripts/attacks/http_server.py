"""Attacks of hostile clients on an API server that this starts itself, and their effect on other clients.

    python -m ridgeline_bench.scripts.attacks.http_server [ATTACK …]          each attack, one after the other
    python -m ridgeline_bench.scripts.attacks.http_server --cases 50000       mutated requests
        (ridgeline_bench/scripts/attacks/http_cases.py)

For each attack: the longest that another client waited for /health/live meanwhile, and in quiet windows right before
and after it; the API server's memory before and after, and whether every answer was right. Cores are shared, so a stall
is the difference of the waits in the same minute, STALL at the most. Exits with 1 where the server broke: a process
lost, an answer that was wrong, memory that stays above FLAT, or a stall. Everything is bounded in bytes and in time,
and goes to 127.0.0.1.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

from ridgeline_bench.scripts.attacks.http_cases import campaign
from ridgeline_bench.scripts.served import Served, resident

KEY = "attack-key"
FLAT = 64 << 20  # bytes that an API server may keep after an attack
MOST = 31 << 20  # bytes of a body: below the server's bound
STALL = 0.1  # seconds that another client may wait longer than in the quiet windows
QUIET = 2.0  # seconds of a quiet window
PATIENCE = 300.0


@dataclass
class Health:
    """Another client: asks /health/live again and again, and keeps the longest wait."""

    url: str
    waits: list[float] = field(default_factory=list)
    failures: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Health:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        connection = http.client.HTTPConnection(self.url, timeout=PATIENCE)
        while not self._stop.wait(0.005):
            began = time.monotonic()
            try:
                connection.request("GET", "/health/live")
                self.failures += connection.getresponse().read() != b'{"status":"ok"}'
            except (OSError, http.client.HTTPException):
                self.failures += 1
                connection.close()
            self.waits.append(time.monotonic() - began)


# ---- attacks: each says how it was answered ----

Attack = Callable[[str], str]


def post(body: bytes | Any, path: str = "/v1/completions") -> Attack:
    """Return an attack of one request, which returns "STATUS: message"."""

    def attack(url: str) -> str:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(url, timeout=PATIENCE)
        connection.request("POST", path, data, {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        message = json.loads(text).get("error", {}).get("message", "") if answer.status != 200 else ""
        return f"{answer.status}: {message[:70]}"

    return attack


def flood(head: bytes, line: bytes, *, total: int, connections: int = 4, pause: float = 0.0) -> Attack:
    """Lines without end, as many as are taken."""

    def one(address: tuple[str, int], sent: list[int]) -> None:
        block = line * max(1, (1 if pause else 1 << 16) // len(line))
        with socket.create_connection(address, timeout=10) as connection:
            try:
                connection.sendall(head)
                for _ in range(total // connections // len(block)):
                    connection.sendall(block)
                    sent[0] += len(block)
                    time.sleep(pause)
            except OSError:
                pass

    def attack(url: str) -> str:
        host, _, port = url.partition(":")
        sent = [0]
        threads = [threading.Thread(target=one, args=((host, int(port)), sent)) for _ in range(connections)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        return f"200: {sent[0] / 1e6:.1f} MB were taken"

    return attack


CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
TEXT = {"prompt": "x", "max_tokens": 1}
CHATS = "/v1/chat/completions"
ECHO = TEXT | {"prompt": [[100 + i] * 2000 for i in range(128)], "echo": True, "logprobs": 20}
LIKELIEST = {"logprobs": True, "top_logprobs": 20, "ignore_eos": True}
LONG_CHAT = [{"role": "user", "content": "x = [" + "1, " * 600}]
RESPONSE = {"input": "x", "max_output_tokens": 1024, "ignore_eos": True, "top_logprobs": 20}
RESPONSE |= {"include": ["message.output_text.logprobs"]}
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
KEYED = CHUNKED[:-2] + f"Authorization: Bearer {KEY}\r\n\r\n".encode()


def filled(before: bytes, unit: bytes, after: bytes, most: int = MOST) -> bytes:
    return before + unit * ((most - len(before) - len(after)) // len(unit)) + after


def call(arguments: bytes) -> bytes:
    start = b'{"max_tokens":1,"messages":[{"role":"assistant","content":"x","tool_calls":['
    start += b'{"type":"function","function":{"name":"f",'
    return start + b'"arguments":' + arguments + b"}}]}]}"


def each(*bodies: Any, path: str = "/v1/completions", threads: int = 4) -> Attack:
    """Many requests, several at a time; how many had which status, the commonest first."""

    def attack(url: str) -> str:
        with ThreadPoolExecutor(threads) as pool:
            statuses = Counter(answer[:3] for answer in pool.map(lambda body: post(body, path)(url), bodies))
        return ", ".join(f"{status}: {count} times" for status, count in statuses.most_common())

    return attack


def get(path: str) -> Attack:
    def attack(url: str) -> str:
        connection = http.client.HTTPConnection(url, timeout=PATIENCE)
        connection.request("GET", path, headers={"Authorization": f"Bearer {KEY}"})
        answer = connection.getresponse()
        size = len(answer.read())
        return f"{answer.status}: {size >> 10} KiB"

    return attack


def nested(number: int) -> Any:
    """A short regex of nested counts, another one for each number."""
    return TEXT | {"structured_outputs": {"regex": f"((((k{number}z{{{900 + number}}}){{999}}){{999}}){{999}})"}}


def attacks() -> Iterator[tuple[str, Attack, str]]:
    """Name, attack, and how its answer begins."""
    yield "the API's reference", get("/docs"), "200"
    yield "nested counts", each(*(nested(number) for number in range(64))), "200"
    yield "4096 completions", post(TEXT | {"prompt": ["x"] * 32, "n": 128}), "200"
    yield "echo with logprobs", post(ECHO), "200"
    yield "a streamed echo", post(ECHO | {"prompt": ECHO["prompt"][:16], "stream": True}), "200"
    yield "chat with logprobs", post(CHAT | LIKELIEST | {"max_tokens": 256, "n": 32}, CHATS), "200"
    yield "prompt logprobs", post(CHAT | {"messages": LONG_CHAT, "prompt_logprobs": 20}, CHATS), "200"
    yield "response with logprobs", post(RESPONSE, "/v1/responses"), "200"
    yield "a 25 MB argument", post(call(json.dumps('{"a":"' + "x" * (25 << 20) + '"}').encode()), CHATS), "200"
    yield "spaces", post({"prompt": " " * 40_000 + "x"}, "/tokenize"), "200"
    yield "500 requests", each(*[TEXT | {"max_tokens": 64}] * 500, threads=64), "200"
    yield "load and unload", each(*[{}] * 500, path="/v2/repository/models/embedded/unload", threads=16), "404"
    yield "trailers before 401", flood(CHUNKED + b"0\r\n", b"x-trailer: abcdefghij\r\n", total=200 << 20), "200"
    yield "trailers with a key", flood(KEYED + b"0\r\n", b"x-trailer: abcdefghij\r\n", total=200 << 20), "200"
    yield "one trailer", flood(KEYED + b"0\r\nx: ", b"a" * 1024, total=200 << 20), "200"
    yield "chunk extension", flood(KEYED + b"1;", b"a" * 1024, total=200 << 20), "200"
    yield "tiny chunks", flood(KEYED, b"1\r\na\r\n", total=64 << 20), "200"
    yield "head", flood(b"GET / HTTP/1.1\r\nx: ", b"a" * 1024, total=64 << 20), "200"
    yield "pipelined", flood(b"", b"GET /health/live HTTP/1.1\r\n\r\n", total=8 << 20), "200"
    yield "garbage", flood(b"", b"\r\n", total=16 << 20), "200"
    yield "unknown field", post(filled(b'{"prompt":"x","max_tokens":1,"x":[', b"[],", b"[]]}")), "400"
    yield "unknown text", post(filled(b'{"prompt":"x","max_tokens":1,"x":"', b"[{,", b'"}')), "200"
    yield "spaces in JSON", post(filled(b'{"prompt":"x","max_tokens":1', b" ", b"}")), "200"
    yield "arguments", post(call(json.dumps("[" + "[]," * (8 << 20) + "[]]").encode()), "/v1/chat/completions"), "400"
    yield "schema", post(TEXT | {"structured_outputs": {"json": {"enum": list(range(3 << 20))}}}), "400"
    yield "schema as text", post(TEXT | {"structured_outputs": {"json": "[" * (30 << 20)}}), "400"
    yield "logit_bias", post(TEXT | {"logit_bias": {str(i): 1 for i in range(2 << 20)}}), "400"
    yield "prompt ids", post(TEXT | {"prompt": [100] * (1 << 20)}), "400"
    yield "too many ids", post(TEXT | {"prompt": [100] * (5 << 20)}), "400"
    yield "negative prompt", post(TEXT | {"negative_prompt": [100] * (1 << 20), "guidance_scale": 2}), "400"
    yield "allowed ids", post(TEXT | {"allowed_token_ids": [1] * (1 << 20)}), "400"
    yield "detokenize", post({"tokens": [100] * (1 << 20)}, "/detokenize"), "200"
    yield "tokenize", post({"prompt": "ab " * 80_000, "return_token_strs": True}, "/tokenize"), "200"
    yield "a long prompt", post(TEXT | {"prompt": "ab " * 170_000}), "400"
    yield "a longer one", post(TEXT | {"prompt": "a" * (30 << 20)}), "400"
    yield "many prompts", post(TEXT | {"prompt": ["ab " * 1300] * 512, "max_tokens": 4000}), "400"
    yield "wrong type", post(TEXT | {"n": "x" * (30 << 20)}), "400"
    yield "stop", post(TEXT | {"stop": ["x"] * (1 << 20)}), "400"
    yield (
        "messages",
        post(CHAT | {"messages": [{"role": "user", "content": "x"}] * 50_000}, "/v1/chat/completions"),
        "400",
    )
    yield (
        "template kwargs",
        post(CHAT | {"chat_template_kwargs": {"x": [1] * (1 << 20)}}, "/v1/chat/completions"),
        "200",
    )
    yield "choice", post(TEXT | {"structured_outputs": {"choice": [f"x {i}" for i in range(4096)]}}), "200"
    yield "too long", post(b'"' + b"a" * (40 << 20) + b'"'), "413"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="ATTACK")
    parser.add_argument("--cases", type=int, default=0, help="how many mutated requests to send, instead of attacks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pooling", action="store_true", help="the mutated requests go to a model that embeds")
    options = parser.parse_args()
    flags = ["--api-key", KEY, "--log-level", "error", "--grammar-timeout", "1"]
    flags += ["--runner", "pooling", "--convert", "embed"] if options.pooling else []
    with TemporaryDirectory() as folder, Served(*flags, "--batch-dir", folder) as server:
        url = server.url.removeprefix("http://")
        if options.cases:
            before = (server.engine, *server.api_servers)
            broke = campaign(url, KEY, options.cases, options.seed, lambda: resident(server.api_servers[0]))
            lost = sum(pid not in (server.engine, *server.api_servers) for pid in before)
            print(f"{lost} processes lost")
            return int(bool(broke or lost))
        return run(server, url, options.names)


def run(server: Served, url: str, names: list[str]) -> int:
    broken, processes = 0, (server.engine, *server.api_servers)
    print(post(TEXT)(url), "(the first answer)")
    print(f"{'attack':22} {'quiet':>7} {'attacked':>8} {'seconds':>8} {'MiB before':>10} {'after':>6}  answer")
    quiet = quiet_wait(url)
    for name, attack, wanted in attacks():
        if names and name not in names:
            continue
        before, began = resident(server.api_servers[0]), time.monotonic()
        with Health(url) as other:
            try:
                answer = attack(url)
            except (OSError, http.client.HTTPException) as error:
                answer = f"none: {error!r}"
        took, after = time.monotonic() - began, resident(server.api_servers[0])
        worst, before_it = max(other.waits, default=0.0), quiet
        quiet = quiet_wait(url)
        beside = max(before_it, quiet)
        right = answer.startswith(wanted) and not other.failures and after - before < FLAT and worst - beside < STALL
        broken += not right
        print(
            f"{name:22} {beside:6.3f}s {worst:7.3f}s {took:8.2f} {before >> 20:10} {after >> 20:6}  "
            f"{answer}{'' if right else '   BROKEN'}",
            flush=True,
        )
    lost = [pid for pid in processes if pid not in (server.engine, *server.api_servers)]
    print(f"{broken} broken, {len(lost)} processes lost; the loop was held up {server_stalls(url)}")
    return int(bool(broken or lost))


def quiet_wait(url: str) -> float:
    """Return the longest wait for /health/live without an attack."""
    with Health(url) as quiet:
        time.sleep(QUIET)
    return max(quiet.waits, default=0.0)


def server_stalls(url: str) -> str:
    connection = http.client.HTTPConnection(url, timeout=PATIENCE)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {KEY}"})
    lines = connection.getresponse().read().decode().splitlines()
    found = {line.split("{")[0]: line.rsplit(" ", 1)[1] for line in lines if line.startswith("ridgeline:face_loop")}
    times, seconds = (found.get(f"ridgeline:face_loop_{name}_total", "?") for name in ("stalls", "stall_seconds"))
    return f"{times} times, {seconds} s in all"


if __name__ == "__main__":
    sys.exit(main())
