"""Rules of `ridgeline route` beside round robin, on several servers of the embedded model, and what the router costs.

    python -m ridgeline_bench.scripts.routed [--servers 4] [--rounds 2] [--rules prefix] [--cache 24M] [--quick]
        [--output FILE.jsonl]

    shared   prompts of some 1,600 tokens that begin in one of 12 ways
    random   prompts of 100 to 800 tokens that share nothing
    cost     requests of one token, to a server and through the router in turns: what the router adds

Eight clients ask for four tokens each. Rules take turns, each with a router and prompts of its own, and the order
changes from round to round, since cores may be shared. --quick runs two servers and few prompts.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline_bench.scripts.asked import asked, keep
from ridgeline_bench.scripts.served import PATIENCE, Served, promise

CLIENTS, BEGINNINGS, TOKENS = 8, 12, 4
SHARED, TAIL = 5200, 6500  # characters of a beginning, and from one to the next
SOURCES = ("engine/scheduler.py", "engine/engine.py", "cli/serve.py", "serving/http/middleware.py", "llm.py")


def text() -> str:
    """Return Python code to ask for more of: the embedded model's own subject."""
    folder = Path(__file__).parents[2] / "ridgeline"
    found = "".join((folder / name).read_text() for name in SOURCES)
    return found * (1 + TAIL * BEGINNINGS // len(found))


def prompts(kind: str, count: int, seed: int) -> list[str]:
    """Return the prompts of a kind, "shared" or "random"."""
    draw, source = random.Random(seed), text()
    if kind == "random":
        starts = (draw.randrange(len(source) - 2500) for _ in range(count))
        return [f"# {draw.random()}\n{source[start : start + draw.randrange(300, 2500)]}" for start in starts]
    starts = [n * TAIL + 37 * seed for n in range(BEGINNINGS)]
    return [f"{source[(start := draw.choice(starts)) : start + SHARED]}\n# {draw.random()}" for _ in range(count)]


def post(url: str, prompt: str, tokens: int = TOKENS) -> float:
    """Return the seconds of a request."""
    body = json.dumps({"model": "embedded", "prompt": prompt, "max_tokens": tokens, "temperature": 0}).encode()
    request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as answer:
        answer.read()
    return time.perf_counter() - began


@contextmanager
def routed(servers: Sequence[Served], rule: str) -> Iterator[tuple[str, int]]:
    """Yield the address and the process of a router before these servers, once it knows them all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "ridgeline", "route", "--worker-urls", *(server.url for server in servers)]
    command += ["--policy", rule, "--port", str(port), "--log-level", "error", "--health-timeout", "20"]
    router, url = subprocess.Popen(command), f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + PATIENCE
        while not knows_all(url):
            promise(router.poll() is None and time.monotonic() < until, "the router did not find its servers.")
            time.sleep(0.2)
        yield url, router.pid
    finally:
        router.kill()
        router.wait()


def knows_all(url: str) -> bool:
    """Return True if a router is up and none of its servers is down."""
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as answer:
            return "down" not in json.load(answer)
    except OSError:
        return False


def rate(servers: Sequence[Served], rule: str, asks: Sequence[str]) -> float:
    """Return the requests per second of a rule."""
    with routed(servers, rule) as (url, _), ThreadPoolExecutor(CLIENTS) as clients:
        began = time.perf_counter()
        list(clients.map(lambda prompt: post(url, prompt), asks))
        return len(asks) / (time.perf_counter() - began)


def cpu_seconds(process: int) -> float:
    """Return the processor time that a process has taken."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cost(server: Served, requests: int) -> dict[str, float]:
    """Return the milliseconds that a request takes longer through a router, and the router's processor time for it."""
    with routed([server], "least") as (routed_url, process):
        for url in (server.url, routed_url):
            post(url, "x = 1", 1)
        before, longer = cpu_seconds(process), list[float]()
        for _ in range(requests):
            direct = post(server.url, "x = 1", 1)
            longer.append(post(routed_url, "x = 1", 1) - direct)
        spent = (cpu_seconds(process) - before) / requests
    return {"longer_ms": 1e3 * statistics.median(longer), "cpu_ms": 1e3 * spent}


def measure(servers: Sequence[Served], a: Any) -> Iterator[dict[str, Any]]:
    """Yield a line for each rule, kind of prompts and round, and one for the cost."""
    for number in range(a.rounds):
        for kind in ("shared", "random"):
            rules = ["round-robin", *a.rules][:: -1 if number % 2 else 1]
            for rule in rules:
                own = f"# {rule}, {number}\n"  # so that no cache knows them
                found = rate(servers, rule, [own + each for each in prompts(kind, a.prompts, number + 1)])
                yield {"kind": kind, "round": number, "rule": rule, "requests_per_second": found}
    yield {"kind": "cost", **cost(servers[0], a.prompts)}


def of_round_robin(lines: Sequence[dict[str, Any]], kind: str, rule: str) -> float:
    """Return a rule's requests a second over round robin's: the geometric mean over rounds, in half of which it ran
    second. What runs second may be slower for that alone."""
    found = {(x["rule"], x["round"]): x["requests_per_second"] for x in lines if x["kind"] == kind}
    shares = [rate / found["round-robin", number] for (name, number), rate in found.items() if name == rule]
    return statistics.geometric_mean(shares)


def main() -> None:
    a = asked(
        __doc__, servers=4, rounds=2, prompts=96, rules=["prefix"], cache=("24M", "of keys and values, a server"),
        quick=(False, "two servers, twelve prompts"), output=Path,
    )  # fmt: skip
    if a.quick:
        a.servers, a.rounds, a.prompts = 2, 1, 12
    elif a.rounds % 2:
        raise SystemExit(f"rounds must be even, so that each rule comes second as often as first, got {a.rounds}.")
    flags = ("--device", "cpu", "--kv-cache-memory", a.cache, "--max-num-seqs", "4", "--log-level", "error")
    about = {"workload": "routed", "servers": a.servers, "prompts": a.prompts, "cache": a.cache}
    lines, table = list[dict[str, Any]](), Table("prompts", "round", "rule", "requests/s", "of round robin")
    with ExitStack() as stack:
        servers = [stack.enter_context(Served(*flags)) for _ in range(a.servers)]
        for line in measure(servers, a):
            lines.append(line)
            print(line, flush=True)
            keep(a.output, {**about, **line})
    plain = {(x["kind"], x["round"]): x["requests_per_second"] for x in lines if x.get("rule") == "round-robin"}
    for line in lines[:-1]:
        here = line["requests_per_second"]
        share = here / plain[line["kind"], line["round"]]
        table.add_row(line["kind"], str(line["round"]), line["rule"], f"{here:.2f}", f"{share:.2f}")
    Console().print(table)
    for kind in ("shared", "random"):
        for rule in a.rules:
            print(f"{kind} {rule}: {of_round_robin(lines, kind, rule):.2f} of round robin, over both orders")
    print(f"through the router {lines[-1]['longer_ms']:.2f} ms longer, {lines[-1]['cpu_ms']:.2f} ms of a processor")


if __name__ == "__main__":
    main()
