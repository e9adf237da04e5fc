"""Clocks of how long a process has given no sign of life, without the time in which it could not run.

A process that is stopped, or waits for what never comes, hangs. One that has no core to run on does not, and neither
does one whose watcher stood still as well: a laptop that was closed, a group of processes that was suspended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable


class Laps:
    """A clock that runs only while it is looked at. A look that comes late counts as if it had come after two periods,
    because the watcher did not run meanwhile."""

    def __init__(self, period: float, now: Callable[[], float] = time.monotonic) -> None:
        """period: seconds between looks, as planned."""
        self._longest, self._now, self._last = 2 * period, now, now()

    def since_last(self) -> float:
        """Return the seconds since the last look."""
        now = self._now()
        elapsed, self._last = min(now - self._last, self._longest), now
        return elapsed


class Silence:
    """The seconds since one process gave a sign of life, as `Laps` counts them. Those in which one of its threads was
    ready to run and got no core do not count."""

    def __init__(self, pid: int, period: float, now: Callable[[], float] = time.monotonic) -> None:
        """period: seconds between looks, as planned. Looks between them only take signs of life."""
        self._period, self._laps, self._waits = period, Laps(period, now), Waits(pid)
        self._now, self._due, self._heard, self._seconds = now, now() + period, False, 0.0

    def look(self, *, heard: bool) -> float:
        """Return the seconds. heard: the process has given a sign of life since the last look."""
        self._heard |= heard
        if (now := self._now()) < self._due:
            return 0.0 if self._heard else self._seconds
        self._due = now + self._period
        elapsed = self._laps.since_last()
        if self._heard:
            self._heard, self._seconds = False, 0.0
            self._waits.forget()
        else:
            # what is short is no silence, and costs no look into /proc
            waited = self._waits.since_last_look(elapsed) if self._seconds > 2 * self._period else 0.0
            self._seconds += max(0.0, elapsed - waited)
        return self._seconds


class Waits:
    """The time for which threads of a process waited for a core, as Linux counts it. Elsewhere it is 0."""

    def __init__(self, pid: int) -> None:
        self._tasks = f"/proc/{pid}/task"
        self._before: dict[str, str] = {}  # thread → its nanoseconds on a core, and those that it waited for one

    def forget(self) -> None:
        """Begin anew: the next look compares with nothing."""
        self._before = {}

    def since_last_look(self, elapsed: float) -> float:
        """Return the longest wait of a thread, of the seconds that have passed since."""
        now: dict[str, str] = {}
        longest = 0.0
        for thread in _listed(self._tasks):
            now[thread] = _read(f"{self._tasks}/{thread}/schedstat")
            if (before := self._before.get(thread)) is not None:
                longest = max(longest, self._waited(thread, before, now[thread], elapsed))
        self._before = now
        return longest

    def _waited(self, thread: str, before: str, now: str, elapsed: float) -> float:
        if now == before:  # the kernel adds up a wait when it ends
            return elapsed if _state(_read(f"{self._tasks}/{thread}/stat")) == "R" else 0.0
        try:
            return min(elapsed, (int(now.split()[1]) - int(before.split()[1])) / 1e9)
        except (IndexError, ValueError):
            return 0.0


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _state(stat: str) -> str:
    """Return the letter of a thread's state from its line in /proc."""
    return stat.rpartition(")")[2].strip()[:1]
