"""Threads that owners of work share fairly: they take turns, and no owner ever has all of them."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")

MOST_EACH = 256  # pieces of work that one owner may have waiting
MOST = 4096  # and all of them together


class Full(Exception):
    """Raised when no more work may wait."""


class Job(Generic[T]):
    """One piece of work. `future` is its result. `started` is on the monotonic clock, and None while the work waits."""

    def __init__(self, owner: str, work: Callable[[], T]) -> None:
        self.owner = owner
        self.future: Future[T] = Future()
        self.queued = time.monotonic()
        self.started: float | None = None
        self._work = work

    def run(self) -> None:
        try:
            self.future.set_result(self._work())
        except BaseException as error:
            self.future.set_exception(error)
        finally:
            del self  # an error keeps this frame, which would keep the job, its future and so the error itself


class FairPool:
    """A pool of at least two `threads`.

    An owner holds at most all threads but one, so long work of one owner never makes the next owner wait. Threads start
    with the first work, and none of them delays the end of the process. `most_each` and `most` bound what may wait.
    `held` is the most threads of an owner, if they are fewer.
    """

    def __init__(
        self, threads: int, name: str, *, most_each: int = MOST_EACH, most: int = MOST, held: int | None = None
    ) -> None:
        self._held = min(threads - 1, held or threads)
        self._threads, self._name, self._most_each, self._most = threads, name, most_each, most
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[Job]] = {}  # by owner; the owner to be served next comes first
        self._running: Counter[str] = Counter()
        self._begun = False

    def submit(self, owner: str, work: Callable[[], T]) -> Job[T]:
        """Queue the work and return its job. Raise Full if too much waits already."""
        job = Job(owner, work)
        with self._changed:
            queue = self._waiting.setdefault(owner, deque())
            if len(queue) >= self._most_each or sum(map(len, self._waiting.values())) >= self._most:
                raise Full
            queue.append(job)
            if not self._begun:
                self._begun = True
                for number in range(self._threads):
                    threading.Thread(target=self._work, daemon=True, name=f"{self._name}-{number}").start()
            self._changed.notify()
        return job

    def _work(self) -> None:
        while True:
            with self._changed:
                while (job := self._next()) is None:
                    self._changed.wait()
                job.started = time.monotonic()
                self._running[job.owner] += 1
            job.run()
            with self._changed:
                self._running -= Counter([job.owner])  # this form drops owners that have none left
                self._changed.notify_all()

    def _next(self) -> Job | None:
        """Return the first waiting job that was not cancelled and whose owner may have another thread."""
        for owner in list(self._waiting):
            if self._running[owner] >= self._held:
                continue
            queue = self._waiting.pop(owner)
            while queue:
                job = queue.popleft()
                if job.future.set_running_or_notify_cancel():
                    if queue:
                        self._waiting[owner] = queue  # behind the other owners
                    return job
        return None
