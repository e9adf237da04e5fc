"""Model-written Python in processes that can do no harm, and that cannot write their own verdict.

    this process              launcher, once a worker      server, first of its namespaces     the code, a process each
    ────────────              ───────────────────────      ───────────────────────────────     ────────────────────────
    starts a worker    ───►   new namespaces (user,   ───► keeps Python and modules ready
    sends two pipes           mounts, network, …),         forks one with a process       ───► limits, filter of system
                              an empty root                namespace of its own                calls
    sends the source   ──────────────────────────────────────────────────────────────────────► defines the function
    sends arguments    ──────────────────────────────────────────────────────────────────────► calls it
    compares           ◄────────────────────────────────────────────────────────────────────── sends what it returned
    says it is over    ────────────────────────────────►   ends the namespace: nothing is left

Expected results never leave this process. The code learns the arguments of one call at a time, and an answer without
the number that came with these arguments ends the run. Programs of a worker share nothing that one of them can write.
"""

from __future__ import annotations

import json
import math
import os
import platform
import queue
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from ridgeline.core.errors import RidgelineError
from ridgeline.training import sandbox_launcher, sandbox_runner

START_SECONDS, END_SECONDS = 30.0, 5.0  # of the clock: until a worker is there, and until a program is gone


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The bounds of one run.

    seconds: of the clock. cpu_seconds: of the processor. memory: bytes of addresses. files: that are open.
    output: bytes of answers.
    """

    seconds: float = 5.0
    cpu_seconds: int = 3
    memory: int = 512 << 20
    files: int = 16
    output: int = 1 << 20


class CodeCall(NamedTuple):
    """A call of the function under test, and the value that it must return, as JSON has them."""

    arguments: Sequence[Any]
    expected: Any


class CodeEnded(Exception):
    """The code ended, took too long or answered what is no answer."""


class NoSandbox(RidgelineError):
    """No worker can be started, or they end whatever they run."""


class _Run:
    """A program that runs, as this process sees it. questions, answers: this side's ends of its pipes."""

    def __init__(self, limits: Limits, questions: int, answers: int) -> None:
        self._limits, self._deadline, self._buffer = limits, time.monotonic() + limits.seconds, b""
        self._received, self._questions, self._answers = 0, questions, answers
        self.whole = True  # its server outlived it
        os.set_blocking(questions, False)

    def ask(self, question: dict[str, Any]) -> Any:
        """Send an object, and return the answer. Raise CodeEnded."""
        number = secrets.token_hex(8)
        self._send(json.dumps({**question, "number": number}).encode() + b"\n")
        try:
            answer = json.loads(self._line(), parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise CodeEnded("the answer is no JSON") from error
        if not isinstance(answer, dict) or answer.get("number") != number or "value" not in answer:
            raise CodeEnded("the answer belongs to no call")
        return answer["value"]

    def _send(self, data: bytes) -> None:
        while data:
            _, ready, _ = select.select([], [self._questions], [], self._left())
            if not ready:
                raise CodeEnded("time is over")
            try:
                data = data[os.write(self._questions, data) :]
            except OSError as error:
                raise CodeEnded("the process ended") from error

    def _line(self) -> bytes:
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], self._left())
            found = os.read(self._answers, 1 << 16) if ready else b""
            self._received += len(found)
            if not found or self._received > self._limits.output:
                raise CodeEnded("the process ended, or time or room is over")
            self._buffer += found
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def close(self) -> None:
        os.close(self._questions)
        os.close(self._answers)


class _Worker:
    """A server that runs one program at a time, in a process of its own each."""

    def __init__(self, *, isolated: bool) -> None:
        self._isolated = isolated
        self._ends: weakref.finalize[Any, Any] | None = None

    def begin(self, limits: Limits) -> _Run:
        """Begin a program. A server that is not there any more is replaced, once. Raise NoSandbox."""
        for _ in range(2):
            new = self._ends is None
            if new:
                self._start()
            questions, answers = os.pipe(), os.pipe()
            theirs, ours = (questions[0], answers[1]), (questions[1], answers[0])
            bounds = {name: getattr(limits, name) for name in ("memory", "cpu_seconds", "files")}
            try:
                done = self._told(json.dumps(bounds).encode(), theirs, START_SECONDS if new else END_SECONDS)
            finally:
                for each in theirs:
                    os.close(each)
            if done:
                return _Run(limits, *ours)
            for each in ours:
                os.close(each)
            self.close()
        raise NoSandbox("the processes in which code is run end at once.")

    def end(self, run: _Run) -> None:
        """End a program with all that it began."""
        run.close()
        run.whole = self._told(b"end", (), END_SECONDS)
        if not run.whole:
            self.close()

    def _told(self, message: bytes, descriptors: Sequence[int], seconds: float) -> bool:
        """Return True if the server has done what it was told."""
        self._control.settimeout(seconds)
        try:
            socket.send_fds(self._control, [message], descriptors)
            return self._control.recv(16) == b"done"
        except OSError:
            return False

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = tempfile.mkdtemp(prefix="code-")
        python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        described = {
            "isolated": self._isolated, "root": root, "python": python, "control": theirs.fileno(),
            "prefixes": sorted({sys.base_prefix, sys.base_exec_prefix, os.path.dirname(os.path.dirname(python))}),
            "machine": platform.machine(), "server": sandbox_runner.PROGRAM,
        }  # fmt: skip
        with theirs:
            process = subprocess.Popen(
                [python, "-I", "-S", "-c", sandbox_launcher.PROGRAM, json.dumps(described)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={}, cwd=root,
                start_new_session=True, pass_fds=[theirs.fileno()],
            )  # fmt: skip
        self._ends = weakref.finalize(self, _end, process, self._control, root)

    def close(self) -> None:
        """End the server with all that it began."""
        if self._ends is not None:
            self._ends()
            self._ends = None


def _end(process: subprocess.Popen[bytes], control: socket.socket, root: str) -> None:
    control.close()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    shutil.rmtree(root, ignore_errors=True)


class SealedWorkers:
    """Some workers for as many threads. Each starts when it is first needed.

    isolated: False runs programs without namespaces, with all that this user may do.
    """

    def __init__(self, count: int, *, isolated: bool = True) -> None:
        self.count, self._all = count, [_Worker(isolated=isolated) for _ in range(count)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for each in self._all:
            self._idle.put(each)

    def passed(self, source: str, entry: str, calls: Sequence[CodeCall], limits: Limits | None = None) -> int:
        """Return the number of calls, from the first on, that return the expected value; the first other one ends the
        run. Raise NoSandbox.

        source: text that defines the function `entry`.
        """
        for _ in range(2):  # a worker that something else ended says nothing about the code
            right = 0
            with self._run(limits or Limits()) as run, suppress(CodeEnded):
                run.ask({"source": source, "entry": entry})
                for call in calls:
                    if not same(run.ask({"arguments": list(call.arguments)}), call.expected):
                        break
                    right += 1
            if run.whole or right == len(calls):
                break
        return right

    def returned(self, source: str, entry: str, arguments: Sequence[Any], limits: Limits | None = None) -> Any:
        """Return the value of the function `entry` for the arguments, as JSON has it. Raise CodeEnded if there is none,
        and NoSandbox."""
        with self._run(limits or Limits()) as run:
            run.ask({"source": source, "entry": entry})
            return run.ask({"arguments": list(arguments)})

    @contextmanager
    def _run(self, limits: Limits) -> Iterator[_Run]:
        worker = self._idle.get()
        try:
            run = worker.begin(limits)
            try:
                yield run
            finally:
                worker.end(run)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End all workers. No program may run."""
        for each in self._all:
            each.close()

    def __enter__(self) -> SealedWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@cache
def refusal() -> str | None:
    """Return the reason why code cannot be isolated on this machine, or None."""
    if sys.platform != "linux":
        return f"{sys.platform} has no namespaces"
    with SealedWorkers(1) as workers, suppress(NoSandbox):
        if workers.passed("def f(x): return x + 1", "f", [CodeCall([1], 2)]) == 1:
            return None
    return "this kernel or container does not allow new user, mount and network namespaces"


def same(found: Any, expected: Any) -> bool:
    """Return True for equal values of JSON: of equal types, and fractions up to the last digits."""
    if isinstance(expected, float) and isinstance(found, float):
        return found == expected or math.isclose(found, expected, rel_tol=1e-9)
    if type(found) is not type(expected):
        return False
    if isinstance(expected, list):
        return len(found) == len(expected) and all(same(*each) for each in zip(found, expected, strict=True))
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    return bool(found == expected)


def _refuse(name: str) -> Any:
    raise ValueError(name)
