"""The process of one rank: `python -m ridgeline_bench.communication.rank JOB`.

It imports torch, waits for a line on standard input, meets the others and measures. Rank 0 writes one JSON object a
line to standard output: every value is checked before it is timed. A process whose standard input closes ends at once,
since its parent is gone.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ridgeline.kernels.base.launch import on_device
from ridgeline_bench.communication.cases import brought, difference, expected, numbers
from ridgeline_bench.communication.room import Room, Trial, Unavailable
from ridgeline_bench.communication.ways import EAGER, WAYS

INSIDE = 40  # calls in a graph; its launch is then a small part of each
SMALL = 1 << 20  # bytes, up to which calls are captured into graphs: as in a decode step
LIMIT = 60.0  # seconds that a rank waits for the others
CALLS = (3, 400)  # timed at least and at most


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of the ranks of one setting.

    cases: (op, bytes, backend), in order. until: time.monotonic() after which no further case begins.
    effort: seconds for each case.
    """

    rank: int
    size: int
    device: str
    meeting: str
    cases: list[tuple[str, int, str]]
    until: float
    effort: float
    environment: dict[str, str] = field(default_factory=dict)


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print what they like, and that is no result
    if not sys.stdin.readline():
        return
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    device = torch.device("cuda", job.rank) if job.device == "cuda" else torch.device("cpu")
    with on_device(device) if device.type == "cuda" else nullcontext():
        agree = _join(job, device)
        room = Room(job.rank, job.size, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        for found in measure(room, job, agree):
            if job.rank == 0:
                said.write(json.dumps(found) + "\n")
    said.flush()
    os._exit(0)  # no farewell: a communicator whose peer is gone already would wait for it


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


class Agreement:
    """The side talk of ranks, beside the collectives that are measured, over sockets."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LIMIT))

    def all(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        found: list[Any] = [None] * self._size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def first(self, value: Any) -> Any:
        """Return the first rank's value."""
        return self.all(value)[0]


def _join(job: Job, device: torch.device) -> Agreement:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on this machine, whatever its name resolves to
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(job.meeting, job.size),  # type: ignore[attr-defined]
        rank=job.rank,
        world_size=job.size,
        timeout=timedelta(seconds=LIMIT),
        device_id=device if device.type == "cuda" else None,
    )
    return Agreement(job.size)


def measure(room: Room, job: Job, agree: Agreement) -> Iterator[dict[str, Any]]:
    """Check and time every case. Yield the first rank's report of each."""
    for number, (op, nbytes, backend) in enumerate(job.cases):
        if agree.first(time.monotonic() > job.until):
            yield {"event": "late", "left": len(job.cases) - number}
            return
        case = {"op": op, "backend": backend, "ranks": room.size}
        yield {"event": "begins", "bytes": nbytes, **case}
        count = numbers(op, nbytes, room.size, room.dtype)
        trial, why = _prepared(room, op, backend, count)
        if told := _reason(agree.all(why)):
            yield {"event": "left out", "bytes": nbytes, **case, **told}
            continue
        assert trial is not None
        trial.input.zero_()  # sums of zeros do not grow; all ranks have answered, so it is not read any more
        _wait(room)
        times = _times(room, trial, count, backend, job, agree)
        yield {"event": "measured", "bytes": count * room.dtype.itemsize, **case, "samples": times}
        del trial


def _reason(whys: list[tuple[str, str] | None]) -> dict[str, Any] | None:
    """Return why a case is not measured on some rank, if there is one."""
    found = next(((rank, why) for rank, why in enumerate(whys) if why is not None), None)
    return None if found is None else {"kind": found[1][0], "why": found[1][1], "on": found[0]}


def _prepared(room: Room, op: str, backend: str, count: int) -> tuple[Trial | None, tuple[str, str] | None]:
    """Return a trial whose result is right, or why there is none."""
    try:
        if op not in WAYS[backend]:
            raise Unavailable(f"has no {op}")
        trial = WAYS[backend][op](room, count)
        trial.input.copy_(brought(op, room.rank, room.size, count, room.dtype, room.device).view_as(trial.input))
        _wait(room)
        got = trial.run()
        _wait(room)
        checked = op != "copy" or room.rank == 0
        want = expected(op, room.rank, room.size, count, room.dtype, room.device)
        wrong = difference(op, got.to(room.device), want) if checked else None
        return (trial, None) if wrong is None else (None, ("wrong", wrong))
    except Unavailable as error:
        return None, ("not available", str(error))
    except Exception as error:
        return None, ("failed", f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")


def _times(room: Room, trial: Trial, count: int, backend: str, job: Job, agree: Agreement) -> list[float]:
    """Return the seconds of a call, several times, of the rank that was slowest at the median."""
    small = room.device.type == "cuda" and count * room.dtype.itemsize <= SMALL and backend not in EAGER
    batch = _graph(room, trial) if small else trial.call
    each = INSIDE if small else 1
    clock = _device_seconds if room.device.type == "cuda" else _host_seconds
    first = max(agree.all(clock(room, batch)))
    calls = int(min(max(job.effort / max(first, 1e-9), CALLS[0]), CALLS[1] if not small else 30))
    times = []
    for _ in range(calls):
        if room.device.type == "cuda" or calls <= 10:
            agree.all(None)  # ranks begin together; a loop on CPUs keeps them together by itself
        times.append(clock(room, batch) / each)
    everybody = agree.all(times)
    return max(everybody, key=statistics.median)


def _graph(room: Room, trial: Trial) -> Callable[[], object]:
    """Return a function that replays a graph of INSIDE calls, each after the one before."""
    side = torch.cuda.Stream(room.device)
    side.wait_stream(torch.cuda.current_stream(room.device))
    with torch.cuda.stream(side):
        for _ in range(3):
            trial.call()
    _wait(room)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(INSIDE):
            trial.call()
    return graph.replay


def _device_seconds(room: Room, batch: Callable[[], object]) -> float:
    """Return the device's seconds of a batch behind another one, in which ranks meet: a rank that began earlier would
    else wait for the others within its time."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    batch()
    start.record()
    batch()
    end.record()
    _wait(room)
    return start.elapsed_time(end) / 1e3


def _host_seconds(room: Room, batch: Callable[[], object]) -> float:
    started = time.perf_counter()
    batch()
    return time.perf_counter() - started


def _wait(room: Room) -> None:
    if room.device.type == "cuda":
        torch.cuda.synchronize(room.device)


def as_argument(job: Job) -> str:
    """Return the job as its process gets it."""
    return json.dumps(asdict(job))


if __name__ == "__main__":
    main()
