"""The ticket of a completion: its engine's messages about it, and the data that another engine needs to run it if that
one dies."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from msgspec.structs import replace

from ridgeline.serving.errors import RequestFailed
from ridgeline.transport.messages import Ended, Event, Submit

DEADLY = 3  # engines that may die while they run one request, which may be what ends them
UNLUCKY = 4  # engines that may die while they have it: the supervisor gives up after the fifth that dies soon


class RequestTicket:
    """One completion under way. `inbox` holds its tokens (as numbers) and events, oldest first. `ended` is None until
    the completion has ended. `weight` is the load that it is to its engine, in tokens. What comes while the server
    itself is `busy` with the request is not held against its reader.

    `submit` is the message that asks for it, and None once anything has come of it, because another engine could not go
    on from there. `begun` is true once its engine runs it.
    """

    __slots__ = (
        "_buffer",
        "_died_here",
        "_died_running",
        "_waiter",
        "begun",
        "busy",
        "ended",
        "failure",
        "id",
        "inbox",
        "inserted",
        "submit",
        "weight",
    )

    def __init__(self, submit: Submit, buffer: int, weight: int) -> None:
        self.id, self.weight = submit.id, weight
        self.submit: Submit | None = submit
        self.inserted = submit.inserted
        self.inbox: deque[int | Event] = deque()
        self.ended: Ended | None = None
        self.failure: RequestFailed | None = None
        self.busy = self.begun = False
        self._died_here = self._died_running = 0  # engines that had it, and that ran it
        self._buffer = buffer
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: int | Event) -> bool:
        """Add a token or an event. Return False if the reader is now further behind than it may be."""
        self.submit = None
        self.inbox.append(item)
        self._buffer += self.busy
        self.wake()
        return len(self.inbox) <= self._buffer

    @property
    def suspect(self) -> bool:
        """True if an engine died while it ran this request."""
        return self._died_running > 0

    def outlives_engine(self) -> bool:
        """Note that its engine has died. Return True if another one should run it from the beginning."""
        self._died_here += 1
        self._died_running += self.begun
        self.begun = False
        untold = self.submit is not None and self.failure is None
        return untold and self._died_running < DEADLY and self._died_here < UNLUCKY

    def move(self, number: int) -> None:
        """Give it another number, by which the next engine will know it."""
        assert self.submit is not None
        self.id, self.submit = number, replace(self.submit, id=number)

    def fail(self, failure: RequestFailed) -> None:
        self.failure = self.failure or failure
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None:
            resolve(self._waiter)

    def watch(self, waiter: asyncio.Future[None]) -> None:
        """Resolve `waiter` as soon as there is something to read."""
        self._waiter = waiter
        if self.inbox or self.failure is not None or self.ended is not None:
            self.wake()


def resolve(future: asyncio.Future[Any], value: object = None) -> None:
    if not future.done():
        future.set_result(value)
