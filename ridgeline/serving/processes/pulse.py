"""The one clock by which a process that hangs is distinguished from one that works.

Each process of the server shares a page of memory with the supervisor. In it the process counts two things: that it
runs (a thread of its own counts, twice a second), and that its work goes on (its main loop counts, with each turn). A
turn that may take long announces its bound first: a step that compiles, a model that is loaded or woken up.

The supervisor looks four times a second. A process that exceeds a bound is abandoned: its requests end, and a moment
later another takes its place. `core.silence` says which time does not count.
"""

from __future__ import annotations

import asyncio
import faulthandler
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ridgeline.core.silence import Silence

COUNTS = struct.Struct("<QQdd80s")  # of signs that it runs, of turns, bounds of both, what the turn does
SHOW = signal.SIGUSR2  # asks a process for the stacks of its threads, before it is ended
LOADING = 1800.0  # seconds without progress of a model that is loaded, or whose memory moves: disks may be slow
COMPILING = 600.0  # seconds for one kernel
FIRST_STEP = 600.0  # seconds: it allocates, and libraries prepare what they compute with


@dataclass(frozen=True, kw_only=True)
class Patience:
    """The seconds for which the supervisor waits for a process.

    silence: without a sign that the process runs. step: without an end of what the process is doing, where it has not
    announced a longer bound. start: for the first sign. grace: from when the process is abandoned until it is killed;
    meanwhile it writes the stacks of its threads to the log. period: between looks.

    A process that was given up `most` times within `window` seconds is not started again.
    """

    silence: float = 10.0
    step: float = 60.0
    start: float = 180.0
    grace: float = 2.0
    period: float = 0.25
    most: int = 3
    window: float = 60.0


class Pulse:
    """The page, as the process sees it. Without a descriptor no process watches it."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE) if descriptor is None else mmap.mmap(descriptor, mmap.PAGESIZE)
        if descriptor is not None:
            os.close(descriptor)
        self._runs = self._turns = 0
        self._deaf = 0.0
        self._bound: tuple[float, str] = (0.0, "")
        self._lock = threading.Lock()  # a thread that compiles announces it as well

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Pulse:
        """Return the pulse of a process with these arguments, of which the first one is the page's descriptor."""
        pulse = cls(int(arguments[1]) if len(arguments) > 1 else None)
        faulthandler.register(SHOW, all_threads=True)
        return pulse

    def start(self, period: float = 0.5) -> None:
        """Count from now on that this process runs, once in so many seconds."""
        threading.Thread(target=self._run, args=(period,), name="pulse", daemon=True).start()

    def turn(self, within: float = 0.0, what: str = "") -> None:
        """Note that the work goes on. within: seconds in which it goes on again, if that may take longer than usual.
        what: it does, as the end of "it has not ended …"."""
        with self._lock:
            self._bound = within, what
            self._turns += 1
            self._write()

    @contextmanager
    def expecting(self, within: float, what: str) -> Iterator[None]:
        """Announce the bound of what the body does. Afterwards the bound from before holds again."""
        before = self._bound
        self.turn(within, what)
        try:
            yield
        finally:
            self.turn(*before)

    @contextmanager
    def deaf(self, seconds: float) -> Iterator[None]:
        """Announce that the body may hold the interpreter for so long, as an import of a large library does."""
        self._deaf = seconds
        self._count()
        try:
            yield
        finally:
            self._deaf = 0.0
            self._count()

    def _run(self, period: float) -> None:
        while True:
            self._count()
            time.sleep(period)

    def _count(self) -> None:
        with self._lock:
            self._runs += 1
            self._write()

    def _write(self) -> None:
        within, what = self._bound
        COUNTS.pack_into(self._page, 0, self._runs, self._turns, self._deaf, within, what.encode()[:80])


async def turn_with_loop(pulse: Pulse, period: float = 0.5) -> None:
    """Note with each turn of the event loop, once in so many seconds, that it goes on."""
    while True:
        pulse.turn(what="a turn of its event loop")
        await asyncio.sleep(period)


class Watch:
    """The supervisor's view of one process, by its page."""

    def __init__(self, pid: int, page: mmap.mmap, patience: Patience) -> None:
        self._page, self._patience = page, patience
        self._runs = self._turns = 0
        self._silence, self._still = Silence(pid, patience.period), Silence(pid, patience.period)

    def look(self) -> str | None:
        """Return why the process is taken to hang, or None."""
        runs, turns, deaf, within, what = COUNTS.unpack_from(self._page)
        silent = self._silence.look(heard=runs != self._runs)
        still = self._still.look(heard=turns != self._turns or not turns)
        self._runs, self._turns = runs, turns
        patience = self._patience
        if silent > (max(patience.silence, deaf) if runs else patience.start):
            return f"has given no sign of life for {silent:.3g} s"
        if still > max(patience.step, within):
            doing = what.rstrip(b"\0").decode(errors="replace") or "what it does"
            return f"has not ended {doing} for {still:.3g} s"
        return None


def new_page() -> tuple[int, mmap.mmap]:
    """Return a page that a child shares: its descriptor, to be inherited and closed, and its memory."""
    descriptor = os.memfd_create("ridgeline-pulse")
    os.ftruncate(descriptor, mmap.PAGESIZE)
    return descriptor, mmap.mmap(descriptor, mmap.PAGESIZE)
