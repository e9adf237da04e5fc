"""Processes of some modules that begin as forks of one that has imported torch and the engine already.

Importing takes 2.2 s of a core, and most of what a rank does in a test takes less. `forking` lets `subprocess.Popen`
start such modules so, in every other respect as always: the process is a child of this one, with its own environment,
descriptors, folder and session. `forked_ranks` is a fixture that does so for a file. Files whose subject is how
processes start do without it, and `RIDGELINE_TEST_FORKS=0` lets all do so.

    python -P -m tests.forks DESCRIPTOR

is the process that forks. It runs one thread, and ends when the other end of the descriptor's socket closes.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import gc
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn
from unittest.mock import patch

# The modules that may begin as forks, and what they import.
RANK = ("ridgeline.assembly.rank", "ridgeline.ranks.rank")
MODULES = {
    "ridgeline": (),
    "ridgeline.rank_process": RANK,
    "ridgeline.serving.processes.engine_process": ("ridgeline.serving.processes.engine_host",),
    "ridgeline_bench.child": ("ridgeline_bench.child",),
    "ridgeline_bench.communication.rank": ("ridgeline_bench.communication.ways",),
    "tests.kernels.ranks.ranks": (),
    "tests.ranks.fake_rank": RANK,
    "tests.ranks.slow_rank": RANK,
    "tests.ranks.unequal_rank": RANK,
    "tests.ranks.unlike_rank": RANK,
}
# Libraries read variables that begin so when they are imported, or before.
READ_EARLY = ("CUDA", "LD_", "MALLOC", "MKL", "OMP", "ONEDNN", "OPENBLAS", "PYTHONHASHSEED", "TORCH", "TRITON")
PYTHON = sys.executable  # as it is before any test says otherwise
SUBREAPER = 36  # of prctl
HIGH = 512  # no test opens so many descriptors

_ready: Nursery | None = None


class Nursery:
    """The process that forks, as the one that asks it sees it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.environment = _early(os.environ)
        with theirs:
            command = [sys.executable, "-P", "-m", "tests.forks", str(theirs.fileno())]
            path = os.pathsep.join(filter(None, sys.path))
            self._process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": path}
            )

    def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Return the number of a new child of this process."""
        sent = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(SUBREAPER, 1, 0, 0, 0)  # so that a grandchild whose parent has ended becomes our child
        try:
            self._socket.sendmsg([json.dumps(request).encode()], sent)
            answer = self._socket.recv(8)
        finally:
            libc.prctl(SUBREAPER, 0, 0, 0, 0)
        if len(answer) != 8:
            raise OSError("the process that forks others is gone")
        return int(struct.unpack("q", answer)[0])


@contextmanager
def forking() -> Iterator[None]:
    """Let the modules above begin as forks meanwhile."""
    if os.environ.get("RIDGELINE_TEST_FORKS") == "0":
        yield
        return
    start = subprocess._fork_exec  # type: ignore[attr-defined]  # it has every fact that `Popen` knows of a process

    def fork_exec(*facts: Any) -> int:
        found = _request(facts)
        return start(*facts) if found is None else _nursery().fork(*found)

    with patch.object(subprocess, "_fork_exec", fork_exec):
        yield


def _nursery() -> Nursery:
    global _ready  # noqa: PLW0603
    if _ready is None:
        _ready = Nursery()
    return _ready


def _request(facts: Sequence[Any]) -> tuple[dict[str, Any], list[int]] | None:
    """Return the request for the process that forks, and the descriptors that the new process gets. None: the process
    must start as others do."""
    command, _, closes, kept, folder, environment = facts[:6]
    taken, error_pipe, (new_session, group) = facts[6:12], facts[13], facts[15:17]
    command = [os.fsdecode(word) for word in command]
    options = command[1:3] if command[1:2] == ["-P"] else command[1:2]
    name, arguments = command[len(options) + 1 :][:1], command[len(options) + 2 :]
    if command[0] != PYTHON or options[-1:] != ["-m"] or name[:1] == [] or name[0] not in MODULES:
        return None
    pairs = dict(os.environ)
    if environment is not None:
        pairs = dict(os.fsdecode(pair).split("=", 1) for pair in environment)
    if not closes or group != -1 or max(kept) >= HIGH or _early(pairs) != _early(os.environ):
        return None
    standard = {n: taken[at] if taken[at] != -1 else n for n, at in ((0, 0), (1, 3), (2, 5))}
    given = standard | {number: number for number in kept if number != error_pipe}
    request = {
        "module": name[0],
        "arguments": arguments,
        "environment": pairs,
        "folder": os.path.abspath(folder or os.getcwd()),
        "session": bool(new_session),
        "numbers": list(given),
    }
    return request, list(given.values())


def _early(environment: Any) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_EARLY)}


def main() -> NoReturn:
    for name in sorted(set(sum(MODULES.values(), ()))):
        import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, control, *_ = requests.recvmsg(1 << 20, socket.CMSG_SPACE(64 * 4))
        if not message:
            os._exit(0)
        descriptors = array.array("i")
        for _, _, data in control:
            descriptors.frombytes(data)
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:  # it ends at once, so that its child becomes one of the process that asks
            between = os.getpid()
            if (child := os.fork()) != 0:
                os.write(writer, struct.pack("q", child))
                os._exit(0)
            while os.getppid() == between:
                os.sched_yield()
            _become(json.loads(message), list(descriptors))
        os.waitpid(between, 0)
        requests.send(os.read(reader, 8))
        for descriptor in (reader, writer, *descriptors):
            os.close(descriptor)


def _become(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Be the process that was asked for, and end as it does."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _take(dict(zip(request["numbers"], descriptors, strict=True)))
        _open_streams()
        if request["session"]:
            os.setsid()
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        path = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [folder for folder in path if folder and folder not in sys.path]
        sys.argv[1:] = request["arguments"]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _open_streams() -> None:
    """Give the process streams of its own: those that were inherited know the files of another process."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def _take(given: dict[int, int]) -> None:
    """Leave open what was given alone, under the numbers that it has there."""
    high = {
        number: fcntl.fcntl(descriptor, fcntl.F_DUPFD, HIGH + at)
        for at, (number, descriptor) in enumerate(given.items())
    }
    os.closerange(0, HIGH)
    for number, descriptor in high.items():
        os.dup2(descriptor, number)
    os.closerange(HIGH, HIGH + 4096)


if __name__ == "__main__":
    main()
