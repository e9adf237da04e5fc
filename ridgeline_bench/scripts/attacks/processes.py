"""Attacks on the server's processes, on the embedded model: what they do, and what other clients notice.

    python -m ridgeline_bench.scripts.attacks.processes [ATTACK …] [--out FILE]

grammars    One client asks for grammars that take minutes to compile; another for [a-z]{3}, eight times.
templates   A model's chat template makes values of a gigabyte, and values that hold each other forty times over.
device      The device is lost in the middle of a step, as torch tells it.
stop        SIGSTOP to an idle engine, for good.
kill        kill -9 of the engine, of an API server, and of the first process.
socket      Two thousand messages on the local socket that are none.
ulimit      A server that may open sixteen files.

Each attack has a server of its own on 127.0.0.1 and is bounded: minutes in all, and MOST_MEMORY, where its server ends.
A table at the end tells, for each, what happened, how long /health/live took at the most meanwhile (of the clock), and
the most memory that all processes of the server had together.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ridgeline.core.plan.request import SamplingParams
from ridgeline.transport.messages import Hello, Submit, encode
from ridgeline_bench.scripts.served import Served, children, resident

PATIENCE = 120.0  # seconds for one answer
GRAMMAR_TIMEOUT = 2.0
MOST_MEMORY = 8 << 30  # bytes; a server that takes more is ended, and the attack counts as won
SMALL = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}

DOUBLED = "{% set n = namespace(s=[]) %}{% for i in range(30) %}{% set n.s = [n.s, n.s] %}{% endfor %}"
TEMPLATES = {
    "width": "{{ '%1000000000d' % 1 }}",
    "format": "{{ '{:>1000000000}'.format(1) }}",
    "replace": "{{ ('x' * 100).replace('x', 'y' * 8000000) }}",
    "tojson": DOUBLED + "{{ n.s | tojson }}",
    "pprint": DOUBLED + "{{ n.s | pprint }}",
    "many": "{% set n = namespace(s=[]) %}{% for i in range(300) %}"
    "{% set n.s = n.s + ['x' * (8000000 + i)] %}{% endfor %}{{ n.s | length }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
}
SABOTAGE = """
import os, sys
if "ridgeline.serving.processes.engine_process" in " ".join(sys.orig_argv):
    import torch
    from ridgeline.worker.runner import Runner
    forward = Runner.forward
    def lost(self, plan):
        if os.path.exists(os.environ["LOSE_DEVICE"]):
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return forward(self, plan)
    Runner.forward = lost
"""


@dataclass
class Row:
    """attack: its name. happened: in words. worst_health: seconds. memory: bytes."""

    attack: str
    happened: list[str] = field(default_factory=list)
    worst_health: float = 0.0
    memory: int = 0


class Watch:
    """Asks a server how it is, twenty times a second, and weighs its processes."""

    def __init__(self, server: Served) -> None:
        self._server, self._stop = server, threading.Event()
        self._threads = [threading.Thread(target=self._ask), threading.Thread(target=self._weigh)]
        self.worst, self.memory = 0.0, 0

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        while not self._stop.wait(0.05):
            began = time.monotonic()
            status, _ = self._server.get("/health/live")
            self.worst = max(self.worst, time.monotonic() - began if status else 0.0)

    def _weigh(self) -> None:
        while not self._stop.wait(0.05):
            taken = sum(_resident(pid) for pid in _tree(self._server.process.pid))
            self.memory = max(self.memory, taken)
            if taken > MOST_MEMORY:
                self._server.process.kill()


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for child in children(pid):
        yield from _tree(child)


def _resident(pid: int) -> int:
    try:
        return resident(pid)
    except (OSError, IndexError):
        return 0


def post(server: Served, path: str, body: dict[str, Any], key: str = "") -> tuple[int, str, float]:
    """Status (0: none), the error's sentence, seconds."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    asked = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    began = time.monotonic()
    try:
        with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
            return answer.status, "", time.monotonic() - began
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["message"], time.monotonic() - began
    except OSError as error:
        return 0, str(error), time.monotonic() - began


@contextmanager
def environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def counted(statuses: list[int]) -> str:
    return ", ".join(f"{count} x {status}" for status, count in sorted(Counter(statuses).items()))


# ---- attacks ------------------------------------------------------------------------------------------------------


def grammars(row: Row, folder: Path) -> None:
    def slow(number: int) -> dict[str, Any]:
        if number % 2:
            return {"type": "integer", "multipleOf": 1_000_003 + 2 * number}
        patterns = {f"^[a-z]*{number}{i}[a-z]*$": {"type": "integer"} for i in range(700)}
        return {"type": "object", "patternProperties": patterns}

    def hostile(number: int) -> tuple[int, str, float]:
        return post(server, "/v1/completions", SMALL | {"structured_outputs": {"json": slow(number)}}, "mallory")

    flags = ("--api-key", "mallory", "--api-key", "alice", "--grammar-timeout", str(GRAMMAR_TIMEOUT))
    with Served(*flags) as server, Watch(server) as watch, ThreadPoolExecutor(8) as pool:
        running = [pool.submit(hostile, number) for number in range(8)]
        time.sleep(0.5)
        small = [
            post(server, "/v1/completions", SMALL | {"structured_outputs": {"regex": f"[a-z]{{3}}{i}"}}, "alice")
            for i in range(8)
        ]
        theirs = [future.result() for future in running]
        cached = min(
            post(server, "/v1/completions", SMALL | {"structured_outputs": {"regex": "[a-z]{3}0"}}, "alice")[2]
            for _ in range(10)
        )
    row.happened += [
        f"small: {counted([status for status, _, _ in small])}, {max(s for _, _, s in small):.2f} s at most",
        f"slow: {counted([status for status, _, _ in theirs])}, {max(s for _, _, s in theirs):.1f} s at most",
        f"small again: {1000 * cached:.1f} ms with its tokens",
    ]
    row.worst_health, row.memory = watch.worst, watch.memory


def templates(row: Row, folder: Path) -> None:
    branches = "".join(
        f"{{% {'if' if i == 0 else 'elif'} messages[0].content == '{name}' %}}{source}"
        for i, (name, source) in enumerate(TEMPLATES.items())
    )
    (folder / "template.jinja").write_text(branches + "{% else %}{{ messages[0].content }}{% endif %}")
    with Served("--chat-template", str(folder / "template.jinja")) as server:
        for name in (*TEMPLATES, "harmless"):
            with Watch(server) as watch:
                body = {"messages": [{"role": "user", "content": name}], "max_tokens": 1}
                status, _, seconds = post(server, "/v1/chat/completions", body)
            row.happened.append(f"{name}: {status} in {seconds:.1f} s, {watch.memory >> 20} MiB")
            row.worst_health, row.memory = max(row.worst_health, watch.worst), max(row.memory, watch.memory)
            if server.process.poll() is not None:
                row.happened.append("the server was ended: it took too much memory")
                return


def device(row: Row, folder: Path) -> None:
    (folder / "sitecustomize.py").write_text(SABOTAGE)
    flag, path = folder / "lost", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with environment(LOSE_DEVICE=str(flag), PYTHONPATH=path), Served() as server, Watch(server) as watch:
        post(server, "/v1/completions", SMALL)
        engine = server.engine
        flag.touch()
        told = [post(server, "/v1/completions", SMALL)[0] for _ in range(3)]
        ready = server.get("/health/ready")[0]
        flag.unlink()
        back = _seconds_until(lambda: post(server, "/v1/completions", SMALL)[0] == 200, 60)
        row.happened += [
            f"requests: {counted(told)}; /health/ready {ready}",
            f"engine {'replaced' if server.engine != engine else 'the same'}; answers again after {back:.1f} s",
        ]
    row.worst_health, row.memory = watch.worst, watch.memory


def stop(row: Row, folder: Path) -> None:
    with Served() as server, Watch(server) as watch:
        os.kill(server.engine, signal.SIGSTOP)
        noticed = _seconds_until(lambda: server.get("/health/ready")[0] == 503, 30)
        back = _seconds_until(lambda: server.get("/health/ready")[0] == 200, 60)
        row.happened.append(f"not ready after {noticed:.1f} s; another is ready {back:.1f} s later")
    row.worst_health, row.memory = watch.worst, watch.memory


def kill(row: Row, folder: Path) -> None:
    with environment(XDG_RUNTIME_DIR=str(folder)):
        with Served("--api-server-count", "2") as server, Watch(server) as watch:
            for name, victim in (("engine", server.engine), ("API server", server.api_servers[0])):
                os.kill(victim, signal.SIGKILL)
                gone = time.monotonic()
                _seconds_until(lambda victim=victim: not Path(f"/proc/{victim}/cmdline").read_bytes(), 5)  # type: ignore[misc]
                _seconds_until(lambda: post(server, "/v1/completions", SMALL)[0] == 200, 60)
                row.happened.append(f"{name}: answers again after {time.monotonic() - gone:.1f} s")
        time.sleep(0.5)
        left = len(list(folder.glob("ridgeline-*")))
        with Served():
            now = len(list(folder.glob("ridgeline-*")))
        row.happened.append(f"first process: {left} directory left, {now - 1} once the next server runs")
    row.worst_health, row.memory = watch.worst, watch.memory


def socket(row: Row, folder: Path) -> None:
    draw = random.Random(0)
    good = encode(
        Submit(
            id=1, name="x", index=0, prompt_token_ids=[1], params=SamplingParams(), seed=1, max_total_tokens=4,
            stop_ids=[], eos_ids=[], cache_salt="", priority=0, arrival=0.0,
        )
    )  # fmt: skip
    with environment(XDG_RUNTIME_DIR=str(folder)), Served() as server, Watch(server) as watch:
        engine = server.engine
        rude = zmq.Context.instance().socket(zmq.DEALER)
        rude.setsockopt(zmq.LINGER, 0)
        rude.connect(f"ipc://{next(folder.glob('ridgeline-*/engine-0'))}")
        for number in range(2000):
            kinds = (
                [draw.randbytes(draw.randrange(1, 200))],
                [good[: draw.randrange(len(good))]],
                [good, good],
                [msgspec.msgpack.encode(draw.choice([None, 7, [], ["submit"], ["hello", 3], {"a": 1}]))],
                [encode(Hello(name="f")) + b"\x00"],
            )
            rude.send_multipart(kinds[number % len(kinds)])
        rude.send(bytes((64 << 20) + 1))
        time.sleep(2)
        status = post(server, "/v1/completions", SMALL)[0]
        same = server.process.poll() is None and server._children("engine_process") == [engine]
        row.happened.append(
            f"2001 messages: the engine is {'the same' if same else 'not the same'}; a request: {status}"
        )
        rude.close()
    row.worst_health, row.memory = watch.worst, watch.memory


def ulimit(row: Row, folder: Path) -> None:
    for most in (16, 64):
        command = ["sh", "-c", f"ulimit -n {most}; exec {sys.executable} -m ridgeline serve --port 0"]
        try:
            ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:
            row.happened.append(f"{most}: it hung")
            continue
        lines = ended.stderr.strip().splitlines()
        row.happened.append(f"{most}: code {ended.returncode}, {len(lines)} line(s): {lines[-1][:90] if lines else ''}")


def _seconds_until(true: Callable[[], bool], most: float) -> float:
    """Return the seconds until it was true; `most` if it never was."""
    began = time.monotonic()
    while time.monotonic() - began < most:
        try:
            if true():
                return time.monotonic() - began
        except OSError:
            return time.monotonic() - began
        time.sleep(0.05)
    return most


ATTACKS = {each.__name__: each for each in (grammars, templates, device, stop, kill, socket, ulimit)}


def main(table: Mapping[str, Callable[[Row, Path], None]], told: str | None) -> None:
    """Run those attacks of a table that the command line names, and print what they did."""
    parser = argparse.ArgumentParser(description=told, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", choices=[*table, []], metavar="ATTACK")
    parser.add_argument("--out", type=Path, help="a JSON line for each attack is appended here")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.attacks or table:
        print(f"{name} …", file=sys.stderr, flush=True)
        row = Row(name)
        rows.append(row)
        with tempfile.TemporaryDirectory(prefix="attack-") as folder:
            try:
                table[name](row, Path(folder))
            except Exception as error:  # the others are still of interest
                row.happened.append(f"the attack itself broke: {type(error).__name__}: {error}")
    print(f"{'attack':<10} {'health s':>8} {'MiB':>6}  what happened")
    for row in rows:
        for i, words in enumerate(row.happened):
            figures = f"{row.worst_health:8.3f} {row.memory >> 20:6d}" if i == 0 else " " * 15
            print(f"{row.attack if i == 0 else '':<10} {figures}  {words}")
    if arguments.out is not None:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()}
        with arguments.out.open("a") as out:
            out.writelines(json.dumps(asdict(row) | {"machine": machine}) + "\n" for row in rows)


if __name__ == "__main__":
    main(ATTACKS, __doc__)
