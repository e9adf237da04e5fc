"""Model-written Python in a process that can do no harm, and that cannot write its own verdict.

    this process            launcher                    first process of the namespaces      the code
    ────────────            ────────                    ───────────────────────────────      ────────
    starts it        ───►   new namespaces (user,  ───► waits; its end ends all       ───►   limits, filter of system
    sends the source        mounts, network, …),        others                               calls, Python anew
    sends arguments  ────────────────────────────────────────────────────────────────────►   calls the function
    compares         ◄────────────────────────────────────────────────────────────────────   sends what it returned

Expected results never leave this process. The code learns the arguments of one call at a time, and an answer without
the number that came with these arguments ends the run.
"""

from __future__ import annotations

import json
import math
import os
import platform
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple

from ridgeline.training import sandbox_launcher, sandbox_runner


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


class _Process:
    """The process of one run, as this one sees it."""

    def __init__(self, limits: Limits, *, isolated: bool) -> None:
        self._limits, self._deadline, self._buffer = limits, time.monotonic() + limits.seconds, b""
        self._received = 0
        self._root = tempfile.mkdtemp(prefix="code-")
        python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        described = {
            **asdict(limits), "isolated": isolated, "root": self._root, "python": python,
            "prefixes": sorted({sys.base_prefix, sys.base_exec_prefix, os.path.dirname(os.path.dirname(python))}),
            "machine": platform.machine(), "runner": sandbox_runner.PROGRAM,
        }  # fmt: skip
        self._process = subprocess.Popen(
            [python, "-I", "-S", "-c", sandbox_launcher.PROGRAM, json.dumps(described)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={}, cwd=self._root,
            start_new_session=True, bufsize=0,
        )  # fmt: skip

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
        assert self._process.stdin is not None
        descriptor = self._process.stdin.fileno()
        os.set_blocking(descriptor, False)
        while data:
            _, ready, _ = select.select([], [descriptor], [], self._left())
            if not ready:
                raise CodeEnded("time is over")
            try:
                data = data[os.write(descriptor, data) :]
            except OSError as error:
                raise CodeEnded("the process ended") from error

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], self._left())
            found = os.read(descriptor, 1 << 16) if ready else b""
            self._received += len(found)
            if not found or self._received > self._limits.output:
                raise CodeEnded("the process ended, or time or room is over")
            self._buffer += found
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        shutil.rmtree(self._root, ignore_errors=True)


def passed(
    source: str, entry: str, calls: Sequence[CodeCall], limits: Limits | None = None, *, isolated: bool = True
) -> int:
    """Return the number of calls, from the first on, that return the expected value; the first other one ends the run.

    source: text that defines the function `entry`. isolated: False runs it without namespaces, with all that this user
    may do.
    """
    process, right = _Process(limits or Limits(), isolated=isolated), 0
    try:
        process.ask({"source": source, "entry": entry})
        for call in calls:
            if not same(process.ask({"arguments": list(call.arguments)}), call.expected):
                break
            right += 1
    except CodeEnded:
        pass
    finally:
        process.close()
    return right


def returned(
    source: str, entry: str, arguments: Sequence[Any], limits: Limits | None = None, *, isolated: bool = True
) -> Any:
    """Return the value of the function `entry` for the arguments, as JSON has it. Raise CodeEnded if there is none."""
    process = _Process(limits or Limits(), isolated=isolated)
    try:
        process.ask({"source": source, "entry": entry})
        return process.ask({"arguments": list(arguments)})
    finally:
        process.close()


@cache
def refusal() -> str | None:
    """Return the reason why code cannot be isolated on this machine, or None."""
    if sys.platform != "linux":
        return f"{sys.platform} has no namespaces"
    if passed("def f(x): return x + 1", "f", [CodeCall([1], 2)]) == 1:
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
