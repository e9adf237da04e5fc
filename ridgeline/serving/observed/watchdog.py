"""A watchdog that notices when an event loop is held up, counts for how long, and logs what held it."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from types import FrameType

logger = logging.getLogger("ridgeline.serving.api_server")

BEAT = 0.05  # seconds between two signs of life
LATE = 0.1  # seconds that a sign of life may be late
MOST_FRAMES = 8  # innermost frames that are logged
QUIET = 1.0  # seconds between two lines in the log: a loop that is held up must not fill the disk as well


class Watchdog:
    """The watchdog of one event loop. `stalls` counts how often the loop was late by more than LATE, and `seconds` by
    how much in all. Time in which the loop's thread could run and got no core does not count: a busy machine is no
    fault of the loop's."""

    def __init__(self) -> None:
        self.stalls, self.seconds = 0, 0.0
        self._due = float("inf")  # when the next sign of life is due
        self._held_by = ""
        self._logged = 0.0
        self._stop = threading.Event()
        self._starved = 0.0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch the loop in which this is called, until `stop`."""
        self._loop = loop
        self._starved = starved()
        self._beat()
        thread = threading.Thread(target=self._watch, args=(threading.get_ident(),), name="watchdog", daemon=True)
        thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _beat(self) -> None:
        now, before, self._starved = time.monotonic(), self._starved, starved()
        late = now - self._due - (self._starved - before)
        if late > LATE:
            self.stalls, self.seconds = self.stalls + 1, self.seconds + late
            if now - self._logged > QUIET:
                self._logged = now
                logger.warning(
                    "the event loop was held up for %.3f s%s", late, self._held_by or " (by what is not known)"
                )
        self._held_by = ""
        if not self._stop.is_set():
            self._due = now + BEAT
            self._loop.call_later(BEAT, self._beat)

    def _watch(self, thread: int) -> None:
        while not self._stop.wait(BEAT):
            if not self._held_by and time.monotonic() > self._due + LATE:
                frame = sys._current_frames().get(thread)
                if frame is not None:
                    self._held_by = _told(frame)


def starved() -> float:
    """Return for how many seconds the calling thread could have run and got no core (Linux; elsewhere 0)."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _told(frame: FrameType) -> str:
    """Describe the frames of a thread in one line, innermost first."""
    summary = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=MOST_FRAMES, lookup_lines=False)
    return " by " + " < ".join(f"{each.name} ({each.filename.rpartition('/')[2]}:{each.lineno})" for each in summary)
