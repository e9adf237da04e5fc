"""The processes of a measurement: one for each rank, and other ones for each protocol and algorithm of NCCL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.communication.rank import LIMIT, Job, as_argument
from ridgeline_bench.communication.ways import LEAST

ROOT = Path(__file__).parents[2]
# NVLink multicast is left off, unless the user says otherwise
SAFE = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
RING = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Backends that share processes, and what these find in their environment. names: what a backend of
    `ways.WAYS` is called here."""

    names: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=dict)
    ops: tuple[str, ...] | None = None


def _nccl(name: str, ops: tuple[str, ...], **environment: str) -> Setting:
    return Setting(names={name: "nccl"}, environment=environment, ops=ops)


GPU_SETTINGS = (
    Setting(
        names={
            name: name
            for name in (
                "ours", "nccl", "ours-two-shot", "symmetric-one-shot", "symmetric-two-shot", "symmetric-copies",
                "symmetric-put", "symmetric-get", "peer-copy", "host-copy",
            )
        }
        | {"nccl-scatter-gather": "scatter-gather", "nccl-two-level": "two-level"}
    ),
    *(
        _nccl(f"nccl-{algorithm}-{protocol}".lower(), ops, NCCL_ALGO=algorithm, NCCL_PROTO=protocol)
        for algorithm, ops in (("Ring", RING), ("Tree", ("all_reduce",)))
        for protocol in ("LL", "LL128", "Simple")
    ),
    _nccl("nccl-host", (*RING, "all_to_all", "send"), NCCL_P2P_DISABLE="1"),
    Setting(names={"nvshmem": "nvshmem", "nvshmem-get": "nvshmem-get"}),
)  # fmt: skip
CPU_SETTINGS = (
    Setting(names={"gloo": "gloo", "gloo-scatter-gather": "scatter-gather", "gloo-two-level": "two-level"}),
)
SETTINGS = {"cuda": GPU_SETTINGS, "cpu": CPU_SETTINGS}


def backends(device: str, ranks: int) -> list[str]:
    """Return the names of all ways between so many ranks on a kind of device, those first that are worth most."""
    return [
        name
        for setting in SETTINGS[device]
        for name, way in setting.names.items()
        if way not in LEAST or (ranks >= LEAST[way] and ranks % 2 == 0)
    ]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A measurement: which ops, sizes and ways, over how many ranks, in how many seconds."""

    device: str
    ranks: int
    ops: Sequence[str]
    sizes: Sequence[int]
    backends: Sequence[str]
    seconds: float
    effort: float

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise InvalidConfig(f"{self.ranks} rank has nobody to talk to; give --ranks of at least 2.")
        known = backends(self.device, self.ranks)
        for name in self.backends:
            if name not in known:
                raise InvalidConfig(
                    f"{name!r} is no way between {self.ranks} {self.device} ranks; there are {', '.join(known)}."
                )

    def chosen(self) -> list[tuple[Setting, list[tuple[str, int, str]]]]:
        """Return each setting that has something to do, with its cases: (op, bytes, name)."""
        found = []
        for setting in SETTINGS[self.device]:
            names = [name for name in setting.names if name in self.backends]
            ops = [op for op in self.ops if setting.ops is None or op in setting.ops]
            cases = [(op, size, name) for op in ops for size in self.sizes for name in names if _has(setting, name, op)]
            if cases:
                found.append((setting, cases))
        return found


def _has(setting: Setting, name: str, op: str) -> bool:
    from ridgeline_bench.communication.ways import WAYS

    return op in WAYS[setting.names[name]]


def run(request: Request) -> Iterator[dict[str, Any]]:
    """Yield the events of all settings, one after the other (`rank.measure`). The processes of the next setting start
    while one measures, up to where they would touch the device. A setting that fails ends with an event `lost`."""
    deadline = time.monotonic() + request.seconds
    chosen = request.chosen()
    with tempfile.TemporaryDirectory(prefix="ridgeline-comm-") as folder:
        waiting: Ranks | None = None
        try:
            for number, (setting, cases) in enumerate(chosen):
                now = waiting or Ranks(request, setting, cases, Path(folder) / f"{number}", deadline)
                waiting = None
                if number + 1 < len(chosen):
                    waiting = Ranks(request, *chosen[number + 1], Path(folder) / f"{number + 1}", deadline)
                yield from now.events()
        finally:
            if waiting is not None:
                waiting.end()


class Ranks:
    """The processes of one setting."""

    def __init__(
        self, request: Request, setting: Setting, cases: list[tuple[str, int, str]], folder: Path, deadline: float
    ) -> None:
        folder.mkdir()
        self._names = {(op, setting.names[name]): name for op, _, name in cases}
        self._cases, self._deadline, self._log = cases, deadline, (folder / "log").open("w+b")
        own = [str(ROOT)] if (ROOT / "ridgeline").is_dir() else []
        path = os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH", "")])])
        environment = {**SAFE, "OMP_NUM_THREADS": "1", **os.environ, **setting.environment, "PYTHONPATH": path}
        self._processes = []
        for rank in range(request.ranks):
            job = Job(
                rank=rank,
                size=request.ranks,
                device=request.device,
                meeting=str(folder / "meeting"),
                cases=[(op, size, setting.names[name]) for op, size, name in cases],
                until=deadline,
                effort=request.effort,
            )
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "ridgeline_bench.communication.rank", as_argument(job)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=self._log,
                    text=True,
                    env=environment,
                    start_new_session=True,
                )
            )

    def events(self) -> Iterator[dict[str, Any]]:
        """Let the ranks begin, and yield what they tell until they end."""
        try:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write("begin\n")
                process.stdin.flush()
            yield from self._told()
        except BrokenPipeError:
            yield self._lost("a rank ended before it began")
        finally:
            self.end()

    def _told(self) -> Iterator[dict[str, Any]]:
        lines: Queue[str | None] = Queue()
        threading.Thread(target=self._pump, args=(lines,), daemon=True).start()
        while True:
            try:
                line = lines.get(timeout=0.5)
            except Empty:
                failed = next((p.returncode for p in self._processes if p.poll() not in (None, 0)), None)
                if failed is not None:
                    yield self._lost(f"a rank ended with code {failed}")
                    return
                if time.monotonic() > self._deadline + LIMIT:
                    yield self._lost(f"no answer for {LIMIT:g} s after the time was over")
                    return
                continue
            if line is None:
                if code := self._processes[0].wait():
                    yield self._lost(f"a rank ended with code {code}")
                return
            event = json.loads(line)
            if "op" in event:
                event["backend"] = self._names[event["op"], event["backend"]]
            yield event

    def _pump(self, lines: Queue[str | None]) -> None:
        stdout = self._processes[0].stdout
        assert stdout is not None
        for line in stdout:
            lines.put(line)
        lines.put(None)

    def _lost(self, why: str) -> dict[str, Any]:
        self._log.seek(0)
        log = self._log.read().decode(errors="replace").strip().splitlines()[-6:]
        return {"event": "lost", "backends": sorted(set(self._names.values())), "why": why, "log": log}

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):
                        stream.close()
        self._log.close()
