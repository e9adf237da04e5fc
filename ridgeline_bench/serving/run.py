"""Client processes: they are started, begin at one moment, and their outcomes are gathered."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ridgeline.core.errors import RidgelineError
from ridgeline_bench.serving.child import Task
from ridgeline_bench.serving.outcome import Outcome, Share

HEAD_START = 0.1  # seconds from when the last process is ready to the start
LINE = 1 << 30  # bytes a child's line may have: the last line holds all outcomes

OnProgress = Callable[[int], None]  # told how many requests have ended


class ClientFailed(RidgelineError):
    """A client process ended with an error."""


@dataclass(frozen=True)
class Run:
    """The outcomes in order of departure. `busy` is the share of a core that the busiest client process used."""

    outcomes: Sequence[Outcome]
    busy: float


def run(task: Task, processes: int, on_progress: OnProgress = lambda count: None) -> Run:
    """Send `task`'s requests from so many processes. Raise ClientFailed if one of them ends with an error."""
    shares = asyncio.run(_run(_split(task, processes), on_progress))
    outcomes = sorted((o for share in shares for o in share.outcomes), key=lambda o: o.index)
    return Run(outcomes, max(share.busy for share in shares))


def _split(task: Task, processes: int) -> list[Task]:
    """Return one task for each process, with every n-th request and its part of the places."""
    if task.max_concurrency:
        processes = min(processes, task.max_concurrency)
    places = [(task.max_concurrency + n) // processes for n in range(processes)]
    return [msgspec.structs.replace(task, share=(n, processes), max_concurrency=places[n]) for n in range(processes)]


async def _run(tasks: Sequence[Task], on_progress: OnProgress) -> list[Share]:
    children = await asyncio.gather(*map(_start, tasks))
    try:
        await asyncio.gather(*map(_line, children))  # until all are ready
        start = time.monotonic() + HEAD_START
        ended = [0] * len(children)

        async def follow(number: int) -> Share:
            child = children[number]
            assert child.stdin is not None
            child.stdin.write(f"{start!r}\n".encode())
            while True:
                line = await _line(child)
                if line.startswith(b"{"):
                    return msgspec.json.decode(line, type=Share)
                ended[number] = int(line)
                on_progress(sum(ended))

        return list(await asyncio.gather(*map(follow, range(len(children)))))
    finally:
        for child in children:
            if child.returncode is None:
                child.kill()
            await child.wait()


async def _start(task: Task) -> asyncio.subprocess.Process:
    command = sys.executable, "-m", "ridgeline_bench.serving.child"
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=LINE)
    assert child.stdin is not None
    child.stdin.write(json.dumps(msgspec.to_builtins(task)).encode() + b"\n")
    return child


async def _line(child: asyncio.subprocess.Process) -> bytes:
    assert child.stdout is not None
    line = await child.stdout.readline()
    if not line.endswith(b"\n"):
        raise ClientFailed(f"a client process failed (exit code {await child.wait()}); its error is above.")
    return line
