"""The cost of Python's interpreter lock (GIL) for the work of an API server.

    python -m ridgeline_bench.scripts.interpreter_lock [--seconds 1] [--output results.jsonl] [--quick]

Only the thread that holds the lock runs Python code. Compiled code may give it back while it works. Each kind of an API
server's work is done again and again by one thread and by two, on as many cores. Of two threads' rate r, relative to
one's, follows the share h of the time that the work holds the lock, as of Amdahl's serial share:

    r = 2 / (1 + h), so h = 2 / r - 1          1: two threads are no faster than one; 0: they share nothing

Beside it stands the longest time that an event loop waited for its turn while one thread did this work: how late it
was, of many sleeps of a millisecond. An engine's steps run in processes of their own for this reason, and API servers
multiply as processes (`--api-server-count`), not as threads. A free-threaded Python has no such lock; the table says
which Python it measured.
"""

from __future__ import annotations

import asyncio
import json
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from ridgeline.core.cores import available
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline_bench.scripts.asked import asked, keep

TEXT = "def f(x):\n    return [x, 'naïve', 0x1f]  # a line of code\n" * 40
CHUNK = {
    "id": "chatcmpl-0",
    "object": "chat.completion.chunk",
    "choices": [{"index": 0, "delta": {"content": " word"}}],
}


class Held(NamedTuple):
    """A kind of work. rate: of one thread, in calls a second. gain: two threads' rate, relative to it. late: seconds
    that an event loop waited at most."""

    kind: str
    rate: float
    gain: float
    late: float

    @property
    def share(self) -> float:
        """The share of the time for which the work holds the lock, 0 … 1."""
        return min(1.0, max(0.0, 2 / self.gain - 1))


def kinds() -> dict[str, Callable[[], object]]:
    """Return one call of each kind of work. All take the time of a few steps of an event loop."""
    tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL)
    ids = tokenizer.encode(TEXT)
    rows = np.random.default_rng(0).standard_normal((64, 8192), dtype=np.float32)
    answers = [CHUNK] * 500
    body = msgspec.json.encode(answers)
    return {
        "Python code": lambda: sum(i * i for i in range(10_000)),
        "a text to tokens": lambda: tokenizer.encode(TEXT),
        "tokens to a text": lambda: tokenizer.decode(ids),
        "500 chunks to JSON": lambda: msgspec.json.encode(answers),
        "500 chunks from JSON": lambda: json.loads(body),
        "a large sort of NumPy": lambda: np.sort(rows),
    }


def calls(work: Callable[[], object], threads: int, seconds: float) -> float:
    """Return the calls a second of so many threads together."""
    done, begin = [0] * threads, threading.Barrier(threads + 1)

    def run(number: int) -> None:
        begin.wait()
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            work()
            done[number] += 1

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    begin.wait()
    started = time.perf_counter()
    for worker in workers:
        worker.join()
    return sum(done) / (time.perf_counter() - started)


def lateness(work: Callable[[], object], seconds: float) -> float:
    """Return the longest time that an event loop was late while a thread works."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            work()

    async def look() -> float:
        latest, until = 0.0, time.perf_counter() + seconds
        while (now := time.perf_counter()) < until:
            await asyncio.sleep(0.001)
            latest = max(latest, time.perf_counter() - now - 0.001)
        return latest

    worker = threading.Thread(target=run)
    worker.start()
    try:
        return asyncio.run(look())
    finally:
        ended.set()
        worker.join()


def measure(kind: str, work: Callable[[], object], seconds: float) -> Held:
    work()
    one, two = (calls(work, threads, seconds) for threads in (1, 2))
    return Held(kind, one, two / one, lateness(work, seconds))


def python() -> str:
    """Return the version, and whether this Python has the lock."""
    free = bool(sysconfig.get_config_var("Py_GIL_DISABLED")) and not getattr(sys, "_is_gil_enabled", lambda: True)()
    return f"Python {sys.version.split()[0]} {'without' if free else 'with'} the lock"


def main() -> None:
    given = asked(
        __doc__, seconds=(1.0, "that each figure takes"), output=Path,
        quick=(False, "a tenth of a second for each figure"),
    )  # fmt: skip
    if available() < 2:
        raise SystemExit("two threads show nothing on one core; run this where the process may use two.")
    print(python())
    print(f"{'':24}{'calls/s':>10}{'two threads':>13}{'holds':>8}{'loop late':>12}")
    for kind, work in kinds().items():
        held = measure(kind, work, 0.1 if given.quick else given.seconds)
        print(f"{kind:24}{held.rate:10,.0f}{held.gain:12.2f}x{held.share:8.0%}{1e3 * held.late:9.1f} ms", flush=True)
        line = {"workload": "the interpreter's lock", "python": python(), **held._asdict(), "share": held.share}
        keep(given.output, line)


if __name__ == "__main__":
    main()
