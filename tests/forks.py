"""Processes of Python that do not take seconds to import torch: they are forked from one that has imported it.

A `Nest` is the process that has. It has no threads, and forks twice for a command: whoever asked adopts the child of
the child that has ended (`PR_SET_CHILD_SUBREAPER`), so that `Popen` waits for it as for any other.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

# Modules that are run in forks, and what of theirs takes time to import.
FORKED = re.compile(
    r"ridgeline\.(rank_process|serving\.processes\.engine_process)|tests\.ranks\.(interpreted|slow|unequal)_rank"
    r"|tests\.kernels\.ranks"
)
IMPORTED = ("ridgeline.assembly.rank", "ridgeline.ranks.rank", "ridgeline.serving.processes.engine_process")
READ_AT_IMPORTS = re.compile(r"CUDA|LD_|OMP|ONEDNN|PYTHON(?!PATH)|TORCH|TRITON|RIDGELINE_TEST")  # names of environments
LARGEST = 1 << 20  # bytes of a command
SET_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)


def read_at_imports(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if READ_AT_IMPORTS.match(name)}


class Nest:
    """A process that has imported what is `IMPORTED`, as this process would now, and forks when asked to."""

    def __init__(self) -> None:
        self.executable, self.path = sys.executable, [os.path.abspath(path) for path in sys.path]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(self.path)}
        self.environment = read_at_imports(environment)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
        with theirs:
            command = [self.executable, "-P", "-m", "tests.forks", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)

    def imports_as(self, environment: Mapping[str, str]) -> bool:
        """Return True if a process with this environment would import the same modules in the same way."""
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        return {*paths} <= {"", *self.path} and read_at_imports(environment) == self.environment

    def fork(self, command: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """Return the number of a child of this process that runs the command. descriptors: those that it inherits."""
        prctl = ctypes.CDLL(None).prctl
        prctl(SET_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self._socket, [json.dumps(command).encode()], descriptors)
            return int(self._socket.recv(32))
        finally:
            prctl(SET_SUBREAPER, 0, 0, 0, 0)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


class Forks:
    """A context in which `Popen` of `python -m` and a module that is `FORKED` forks, unless its environment asks for
    other imports. The first such command starts the nest."""

    def __init__(self) -> None:
        self._nest: Nest | None = None
        self._plain: Any = subprocess.Popen

    def __enter__(self) -> None:
        plain, execute = self._plain, self._plain._execute_child
        parameters = inspect.signature(execute)

        def fork_or_execute(process: Any, *given: Any) -> None:
            asked = parameters.bind(process, *given).arguments
            if not self._fork(process, asked):
                execute(process, *given)

        plain._execute_child, self._execute = fork_or_execute, execute

    def __exit__(self, *_: object) -> None:
        self._plain._execute_child = self._execute
        if self._nest is not None:
            self._nest.close()

    def _fork(self, process: Any, asked: Mapping[str, Any]) -> bool:
        words = [os.fsdecode(word) for word in asked["args"]] if isinstance(asked["args"], (list, tuple)) else []
        words = [words[0], *words[2:]] if words[1:2] == ["-P"] else words
        if words[1:2] != ["-m"] or not FORKED.fullmatch(words[2]) or asked["cwd"] is not None:
            return False
        environment = os.environ if asked["env"] is None else asked["env"]
        nest = self._nest = self._nest or Nest()
        if words[0] != nest.executable or not nest.imports_as(environment):
            return False
        pipes = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        inherited = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)]
        command = {
            "module": words[2],
            "arguments": words[3:],
            "environment": dict(environment),
            "folder": os.getcwd(),
            "session": asked["start_new_session"],
            "descriptors": [0, 1, 2, *asked["pass_fds"]],
        }
        process.pid = nest.fork(command, [*inherited, *asked["pass_fds"]])
        process._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        process._close_pipe_fds(*(asked[name] for name in ends))
        return True


def serve(asked: socket.socket) -> dict[str, Any] | None:
    """Fork for every command. Return the command in a process that was forked for it, and None at the end."""
    while True:
        data, own, *_ = socket.recv_fds(asked, LARGEST, 64)
        if not data:
            return None
        reading, writing = os.pipe()
        if middle := os.fork():
            for descriptor in (writing, *own):
                os.close(descriptor)
            os.waitpid(middle, 0)
            asked.send(os.read(reading, 32))
            os.close(reading)
            continue
        middle = os.getpid()
        if child := os.fork():
            os.write(writing, str(child).encode())
            os._exit(0)
        for descriptor in (reading, writing):
            os.close(descriptor)
        asked.close()
        while os.getppid() == middle:
            time.sleep(1e-4)
        command: dict[str, Any] = json.loads(data)
        settle(command, own)
        return command


def settle(command: Mapping[str, Any], own: Sequence[int]) -> None:
    """Give this process the descriptors and the surroundings that it was asked for."""
    high = [os.dup2(descriptor, 1000 + place) for place, descriptor in enumerate(own)]
    for descriptor in own:
        os.close(descriptor)
    for descriptor, wanted in zip(high, command["descriptors"], strict=True):
        os.dup2(descriptor, wanted)
        os.close(descriptor)
    if command["session"]:
        os.setsid()
    os.chdir(command["folder"])
    os.environ.clear()
    os.environ.update(command["environment"])
    sys.argv = [command["module"], *command["arguments"]]


if __name__ == "__main__":
    for name in IMPORTED:
        import_module(name)
    gc.freeze()  # or every fork looks through it all at its end
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        command = serve(asked)
    if command is not None:
        sys.modules.pop(command["module"], None)
        runpy.run_module(command["module"], run_name="__main__", alter_sys=True)
