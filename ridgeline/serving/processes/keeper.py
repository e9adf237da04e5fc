"""Keepers of processes: each starts one, watches it, and starts it again when it dies or hangs."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from ridgeline.core.errors import RidgelineError
from ridgeline.serving.processes.lifeline import MISTAKE, MISTAKEN, READY
from ridgeline.serving.processes.pulse import SHOW, Patience, Watch, new_page

logger = logging.getLogger(__name__)

MOST_FAILURES = 5  # quick failures in a row
LONGEST_WAIT = 60.0  # seconds between tries of a process that others stand in for
STEADY = 30.0  # seconds of work after which a death is not a quick failure
LAST_WORDS = 1.0  # seconds to read what an ended process had still written
UNBORN = 71  # stands for the exit code of a process that could not be started (EX_OSERR)


class GaveUp(RidgelineError):
    """Raised when the server cannot go on. `code` is its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class ChildProcess:
    """A process to keep, which runs a module.

    `settings` returns what the process reads from standard input, by the number of its life. The process inherits
    `fds`, and gets the descriptor of its pulse's page as its argument. `environment` holds its variables.
    """

    name: str
    module: str
    settings: Callable[[int], bytes]
    fds: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)


class Keeper:
    """A keeper of one process, which it starts again when that dies or hangs.

    `needless` returns True while others do this process's work: then it is tried again for ever, if it was ever ready.
    `after` is the keeper of one that must be ready before this one begins. `on_hung` is called with the number of a
    process that hangs, and why it is taken to, before that is ended.
    """

    def __init__(
        self,
        child: ChildProcess,
        needless: Callable[[], bool] = lambda: False,
        after: Keeper | None = None,
        patience: Patience = Patience(),
        on_hung: Callable[[int, str], None] = lambda process, why: None,
    ) -> None:
        self.name, self._child, self._needless, self._after = child.name, child, needless, after
        self._patience, self._on_hung = patience, on_hung
        self.ready = asyncio.Event()  # set once it was ready for the first time
        self._process: subprocess.Popen[bytes] | None = None
        self._began: float | None = None  # since when this life has worked
        self._mistake = ""  # the mistake that ended it
        self._hung = ""  # why it was taken to hang, in this life
        self._hangs: deque[float] = deque(maxlen=patience.most)  # when the last lives did
        self._stopping = asyncio.Event()

    @property
    def works(self) -> bool:
        return self._began is not None

    async def keep(self) -> None:
        """Keep the process alive until `stop`.

        Raise GaveUp after MOST_FAILURES quick failures in a row, if it hangs again and again, or if its first life ends
        with the user's mistake.
        """
        if self._after is not None:
            await _first_of(self._after.ready, self._stopping)
        failures, life = 0, 0
        while not self._stopping.is_set():
            life += 1
            code, seconds = await self._live(life)
            if self._stopping.is_set():
                return
            if code == MISTAKE and not self.ready.is_set():
                raise GaveUp(self._mistake or f"the {self.name} could not be started.", MISTAKE)
            failures = 1 if seconds >= STEADY else failures + 1
            if not (self.ready.is_set() and self._needless()):
                self._complain(code, failures)
            delay = back_off(failures)
            logger.error("the %s %s; it is started again in %g s", self.name, self._hung or how(code), delay)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)

    def _complain(self, code: int, failures: int) -> None:
        """Raise GaveUp if another life would end like the last ones."""
        most, window = self._patience.most, self._patience.window
        if self._hung and len(self._hangs) == most and self._hangs[-1] - self._hangs[0] <= window:
            raise GaveUp(
                f"the {self.name} {self._hung}, and was taken to hang {most} times within {window:g} s; giving up. "
                "Its last stacks are in the log.",
                1,
            )
        if failures >= MOST_FAILURES:
            raise GaveUp(f"the {self.name} {self._hung or how(code)}, {failures} times in a row; giving up.", 1)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask the process to end, and start no other."""
        self._stopping.set()
        if self._process is not None:
            self._process.send_signal(number)  # does nothing to a process that has ended

    def kill(self) -> None:
        self._stopping.set()
        if self._process is not None:
            self._process.kill()

    def tell(self, line: bytes) -> None:
        """Write a short line to the process's standard input, if it reads there."""
        process = self._process
        if process is None or process.stdin is None or process.stdin.closed:
            return
        room = select.poll()
        room.register(process.stdin, select.POLLOUT)
        if room.poll(0):  # a pipe that has room takes a short line at once
            with suppress(OSError):
                process.stdin.write(line)

    async def _live(self, life: int) -> tuple[int, float]:
        """Run one life. Return its exit code and how long it worked."""
        self._hung = ""
        try:
            process, page = self._start()
        except OSError as error:  # no descriptor, no memory or no process is free: maybe for this moment only
            logger.error("the %s could not be started: %s", self.name, error.strerror)
            return UNBORN, 0.0
        assert process.stdin is not None
        assert process.stdout is not None
        told = asyncio.create_task(self._listen(process.stdout))
        watched = asyncio.create_task(self._watch(process, page))
        try:
            with suppress(BrokenPipeError):  # it may be dead already
                process.stdin.write(self._child.settings(life) + b"\n")
            await _end_of(process)
            await asyncio.wait([told], timeout=LAST_WORDS)
        finally:
            for task in (told, watched):
                task.cancel()
            await asyncio.wait([told, watched])
            process.stdin.close()
            process.stdout.close()
            page.close()
        worked = 0.0 if self._began is None else time.monotonic() - self._began
        self._began = None
        return process.wait(), worked

    def _start(self) -> tuple[subprocess.Popen[bytes], mmap.mmap]:
        descriptor, page = new_page()
        try:
            self._process = subprocess.Popen(
                [sys.executable, *_same_path(), "-m", self._child.module, str(descriptor)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(*self._child.fds, descriptor),
                env=self._child.environment,
                bufsize=0,
                process_group=0,  # Ctrl+C reaches the supervisor alone, which then ends its children in order
            )
        finally:
            os.close(descriptor)
        return self._process, page

    async def _watch(self, process: subprocess.Popen[bytes], page: mmap.mmap) -> None:
        """End the process if it hangs. Those that wait for it learn of it first."""
        watch = Watch(process.pid, page, self._patience)
        while not self._stopping.is_set():
            await asyncio.sleep(self._patience.period)
            if (why := watch.look()) is None:
                continue
            self._hung = why
            self._hangs.append(time.monotonic())
            logger.error("the %s %s: it is ended, and its requests with it", self.name, why)
            self._on_hung(process.pid, why)
            process.send_signal(SHOW)
            await asyncio.sleep(self._patience.grace)
            process.kill()
            return

    async def _listen(self, output: IO[bytes]) -> None:
        """Read what the process writes to standard output. The end of this output does not tell when the process ends,
        because its own children may hold it open for longer."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), output)
        async for line in reader:
            if line.strip() == READY.encode():
                self._began = time.monotonic()
                self.ready.set()
            else:
                said = line.decode(errors="replace").rstrip()
                if said.startswith(MISTAKEN):
                    self._mistake = said.removeprefix(MISTAKEN)
                if not said.startswith(MISTAKEN) or self.ready.is_set():
                    with suppress(OSError):  # such as a full disk, which must not end what listens
                        print(said, file=sys.stderr)


def _same_path() -> list[str]:
    """Return the option that keeps the current folder off a child's module path if it is not on ours. Otherwise modules
    there could hide others from the child."""
    return [] if {"", os.getcwd()} & set(sys.path) else ["-P"]


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _end_of(process: subprocess.Popen[bytes]) -> None:
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def how(code: int) -> str:
    """Describe in words how a process ended."""
    if code == UNBORN:
        return "could not be started"
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def back_off(failures: int) -> float:
    """Return the seconds to wait after so many quick failures in a row: 0, 1, 2, 4, … and at most LONGEST_WAIT."""
    return 0.0 if failures <= 1 else min(2.0 ** min(failures - 2, 16), LONGEST_WAIT)
