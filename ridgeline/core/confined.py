"""Child processes with limits that run a function of ours on what clients and models' authors sent: a chat template, a
grammar, a picture.

    render = Confined("ridgeline.text.sandbox:renderer", seconds=5, memory=512 << 20)
    render({"source": …, "variables": …})

Python cannot stop a step inside its own interpreter (`'%1000000000d' % 1`), nor bound what all values together take;
the kernel can do both for a process. Children start when they are first needed and stay. A call costs two messages over
a socket, both in JSON, and what is large goes through shared memory. A child that breaks a limit is killed, and another
takes its place.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any

from ridgeline.core.cores import of_helper

START_SECONDS = 60.0  # for a child's start, which takes a tenth of a second
LONGEST_REPLY = 128 << 20  # bytes
HEADER = 8  # bytes of a message's length
PIECE = 1 << 20
AT_ONCE, MOST_NUMBERS = 1 << 18, 1 << 12  # characters and numbers of a message that are encoded at a time
SHORT, MOST_SHORT = 1 << 12, 1 << 6  # characters of a short text, and how many of them are encoded at a time
NUMBERS = frozenset({int, float, bool, NoneType})
WALL = 2
ROOT = Path(__file__).parents[2]  # the folder `ridgeline` is imported from
# The whole environment of a child. No key and no token is in it.
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "TZ", "LANG", "LC_ALL", "TMPDIR")


_ENCODE = json.JSONEncoder(ensure_ascii=False).encode


class OverLimit(Exception):
    """The work broke a limit. The message says which: "it took longer than 5 s"."""


class Confined:
    """A function that runs in confined children.

    `function` is the "module:factory" that each child calls once. The factory returns a function from JSON to JSON,
    which raises nothing that concerns the user. At most `most` children run at once, and further calls wait for one.
    `seconds` is the processor time that a call may take, so that a busy machine fails no call; on the clock a call may
    take WALL times that. `memory` is in bytes beyond what a child has once it is ready.

    A `sealed` child has no network, opens no files and starts no processes (`core.sealed`). Its function gets a
    `confined_child.Caller` beside the argument: shared memory to read from, and a way to ask the caller for more.
    """

    def __init__(self, function: str, *, seconds: float, memory: int, most: int = 2, sealed: bool = False) -> None:
        self._function, self._seconds, self._memory, self._sealed = function, seconds, memory, sealed
        self._free = threading.BoundedSemaphore(most)
        self._idle: list[Child] = []
        weakref.finalize(self, _end_all, self._idle)

    def __call__(self, argument: Any, *, seconds: float = 0.0, call: ChildCall | None = None) -> Any:
        """Return the function's result. Raise OverLimit, and TypeError or ValueError for an argument that JSON cannot
        hold.

        seconds: fewer than those of all calls, for this one. call: the shared memory and the questions of one call.
        """
        message = encode(argument)
        with self._free:
            child = self._take()
            try:
                reply = child.ask(message, seconds or self._seconds, call or ChildCall())
                self._check(child, reply)
            except BaseException:
                child.end()
                if self._sealed:  # the next call must not wait for its start
                    self.warm()
                raise
            self._idle.append(child)
        return reply["result"]

    def warm(self, count: int = 1) -> None:
        """Start children for the next calls until so many wait for one, and do not wait until they are ready."""
        while len(self._idle) < count:
            self._idle.append(self._start())

    @property
    def idle(self) -> list[int]:
        """The numbers of the children's processes that wait for a call."""
        return [child.number for child in self._idle]

    def _check(self, child: Child, reply: Any) -> None:
        if reply is None:  # the child ended without a reply
            code = child.end()
            raise OverLimit(f"its process ended ({code}), as happens to programs that need more than {self._limit}")
        if "result" not in reply:
            raise OverLimit(f"it needed more than {self._limit}")

    @property
    def _limit(self) -> str:
        return f"{self._memory >> 20} MiB of memory"

    def _take(self) -> Child:
        """Return a living child of this process. After a fork, the children of the parent process are not ours."""
        while self._idle:
            child = self._idle.pop()
            if child.usable:
                return child
        return self._start()

    def _start(self) -> Child:
        return Child([self._function, str(self._seconds), str(self._memory), *(["sealed"] if self._sealed else [])])


class ChildCall:
    """The shared memory and the answers that go beside a call's argument.

    descriptor: a file of shared memory that the child may read, or None.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = descriptor

    def answer(self, question: Any) -> tuple[Any, int | None]:
        """Return the answer to a question of the child, and a file of shared memory that goes with it, or None."""
        raise NotImplementedError

    def meanwhile(self) -> None:
        """Do work of the caller's own. It is called after each answer, while the child goes on."""


class Child:
    """One process, and the socket to it."""

    def __init__(self, arguments: list[str]) -> None:
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | of_helper()
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        self._link, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # -S: with the path given nothing of site is needed, and it takes a third of the start
                [sys.executable, "-P", "-S", "-m", "ridgeline.core.confined_child", *arguments],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                env=environment,
                process_group=0,  # Ctrl+C must not reach the child
            )
        self._owner = os.getpid()
        self._ready = False
        self._link.setblocking(False)

    @property
    def number(self) -> int:
        """The process's number."""
        return self._process.pid

    @property
    def usable(self) -> bool:
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, message: bytes, seconds: float, call: ChildCall) -> Any:
        """Return the reply, or None if the process ended instead. Raise OverLimit, and RuntimeError if it never
        started."""
        try:
            if not self._ready and self._receive(Deadline(self._process.pid, START_SECONDS)) is None:
                raise RuntimeError(f"a process of ours did not start: {self._process.args!r}")
            self._ready = True
            deadline = Deadline(self._process.pid, seconds)
            self._send(message, deadline, call.descriptor)
            while isinstance(reply := self._receive(deadline), dict) and "asks" in reply:
                answer, descriptor = call.answer(reply["asks"])
                self._send(encode(answer), deadline, descriptor)
                call.meanwhile()
            return reply
        except TimeoutError:
            raise OverLimit(f"it took longer than {seconds:g} s") from None
        except (BrokenPipeError, ConnectionResetError):
            return None

    def end(self) -> int:
        """End the process and return its exit code. Do nothing if it has ended already."""
        if self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
        self._link.close()
        return self._process.returncode or 0

    def _send(self, message: bytes, deadline: Deadline, descriptor: int | None = None) -> None:
        rest, beside = memoryview(message), [] if descriptor is None else [descriptor]
        while rest:
            deadline.wait(self._link.fileno(), select.POLLOUT)
            with suppress(BlockingIOError):  # a socket may be writable and yet too full for a piece
                rest = rest[socket.send_fds(self._link, [rest[:PIECE]], beside) :]
                beside = []

    def _receive(self, deadline: Deadline) -> Any:
        found, wanted = bytearray(), HEADER
        while len(found) < wanted:
            deadline.wait(self._link.fileno(), select.POLLIN)
            piece = self._link.recv(PIECE)
            if not piece:
                return None
            found += piece
            if wanted == HEADER and len(found) >= HEADER:
                wanted += int.from_bytes(found[:HEADER])
                if wanted > LONGEST_REPLY:
                    return None
        return json.loads(memoryview(found)[HEADER:].tobytes())


class Deadline:
    """The limit in time of a process for its current work."""

    def __init__(self, pid: int, seconds: float) -> None:
        self._pid, self._seconds = pid, seconds
        self._used = processor_time(pid)
        self._end = time.monotonic() + WALL * seconds

    def wait(self, descriptor: int, event: int) -> None:
        """Wait until a pipe can be read or written. Raise TimeoutError."""
        poll = select.poll()
        poll.register(descriptor, event)
        left = self._seconds
        while not poll.poll(1000 * left):
            now = time.monotonic()
            left = min(self._seconds - (processor_time(self._pid) - self._used), self._end - now)
            if left <= 0:
                raise TimeoutError
            left = max(left, 0.001)


def processor_time(pid: int) -> float:
    """Return the processor time of a process in seconds, or the clock's time if the system does not tell it."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the kernel's number for its clock (clock_getcpuclockid)
    except OSError:
        return time.monotonic()


def encode(value: Any) -> bytes:
    """Return a message: its length, then JSON. It is written in pieces, since other threads must not wait for a value
    of many megabytes: the encoder keeps the interpreter from them until it returns."""
    pieces: list[bytes] = []
    _write(value, lambda text: pieces.append(text.encode("utf-8", "surrogatepass")))
    size = sum(map(len, pieces))
    return b"".join((size.to_bytes(HEADER), *pieces))


def _write(value: object, put: Callable[[str], None]) -> None:
    if _is_short(value):
        put(_ENCODE(value))
    elif isinstance(value, str):
        put('"')
        for start in range(0, len(value), AT_ONCE):
            put(_ENCODE(value[start : start + AT_ONCE])[1:-1])
        put('"')
    elif isinstance(value, Mapping):
        between = "{"
        for key, each in value.items():
            put(between + _ENCODE({key: 0})[1:-2])
            _write(each, put)
            between = ", "
        put("}" if between == ", " else "{}")
    elif isinstance(value, (list, tuple)):
        put("[")
        for start in range(0, len(value), MOST_NUMBERS):
            put(", " if start else "")
            _write_items(value[start : start + MOST_NUMBERS], put)
        put("]")
    else:
        put(_ENCODE(value))


def _write_items(values: Sequence[object], put: Callable[[str], None]) -> None:
    if all(type(value) in NUMBERS for value in values):
        put(_ENCODE(values)[1:-1])
        return
    for number, value in enumerate(values):
        put(", " if number else "")
        _write(value, put)


def _is_short(value: object) -> bool:
    """Return True for what is encoded at once: a number, a short text, or a few of them, as in most messages."""
    if isinstance(value, (dict, list)) and len(value) <= MOST_SHORT:
        parts = value.values() if isinstance(value, dict) else value
        return all(type(part) in NUMBERS or (type(part) is str and len(part) <= SHORT) for part in parts)
    return isinstance(value, str) and len(value) <= SHORT


def _end_all(children: list[Child]) -> None:
    while children:
        children.pop().end()
