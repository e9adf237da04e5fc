"""One rank's process, as the leader sees it: how it is started, what it has sent, and how it ended."""

from __future__ import annotations

import signal
import subprocess
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

from ridgeline.core.plan.step import StepResult
from ridgeline.core.silence import Silence
from ridgeline.ranks.channel import Channel
from ridgeline.ranks.messages import (
    AdapterRead,
    Alive,
    Answer,
    Done,
    Followed,
    FromRank,
    Loading,
    Mistake,
    Ready,
    decode_from_rank,
)
from ridgeline.ranks.recruits import Recruit

LOOK = 0.25  # seconds between looks at what is overdue
SEND_LIMIT = 30.0  # seconds that a rank may leave messages unread

Progress = Callable[[str, float], None]


class Member:
    """One rank's process, as the leader sees it.

    speaks: it has given a sign of life.
    results: the outcomes of plans that were not compared yet.
    adapters: the outcomes of orders to read one.
    followed: the outcomes of orders about weights.
    settled: as in `Done`.
    """

    def __init__(self, recruit: Recruit) -> None:
        self.rank, self.speaks = recruit.rank, False
        self._heard = False  # since the last look
        self.ready: Ready | None = None
        self.mistake: Mistake | None = None
        self.results: deque[StepResult] = deque()
        self.answers: deque[Answer] = deque()
        self.adapters: deque[AdapterRead] = deque()
        self.followed: deque[Followed] = deque()
        self.settled = 0
        self._recruit, self._process = recruit, recruit.process
        self.channel = Channel(recruit.socket, SEND_LIMIT)
        self._clock = Silence(self._process.pid, LOOK)

    def silence(self) -> float:
        """Return the seconds for which the rank has given no sign of life."""
        heard, self._heard = self._heard, False
        return self._clock.look(heard=heard)

    def take_all(self, progress: Progress | None) -> None:
        """Take what the rank has sent. Raise Closed if it is gone."""
        while (frame := self.channel.receive(0)) is not None:
            self._heard = self.speaks = True
            self._take(decode_from_rank(frame), progress)

    def _take(self, message: FromRank, progress: Progress | None) -> None:
        match message:
            case Done(result, settled):
                self.results.append(result)
                self.settled = settled
            case Answer():
                self.answers.append(message)
            case AdapterRead():
                self.adapters.append(message)
            case Followed():
                self.followed.append(message)
            case Ready():
                self.ready = message
            case Mistake():
                self.mistake = message
            case Loading(what, fraction) if progress is not None:
                progress(what, fraction)
            case Loading() | Alive():
                pass

    def opened(self, number: int) -> BinaryIO:
        """Return a file that the rank has open under this number, to read and write."""
        return open(f"/proc/{self._process.pid}/fd/{number}", "r+b", buffering=0)

    def has_done(self, plan_id: int) -> bool:
        """Return True if the outcome of this plan has come."""
        return bool(self.results) and self.results[-1].plan_id >= plan_id

    @property
    def failure(self) -> str | None:
        """The error of a plan that was not compared yet, if one failed."""
        return next((result.error for result in self.results if result.error is not None), None)

    @property
    def killed(self) -> bool:
        """True if a signal ended the process."""
        return (self._process.poll() or 0) < 0

    def how_it_ended(self) -> str:
        """Return in words how the process ended, or why it is taken for dead."""
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)
            return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"closed its connection, or left it unread for {SEND_LIMIT:g} s"

    def end(self, patience: float) -> None:
        """Wait so many seconds for the process to end, then kill it."""
        self._recruit.end(patience)
