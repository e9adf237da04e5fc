"""Work on what clients sent, outside the event loop, in threads that the owners of requests share fairly.

    ids = await TEXTS.run(lambda: tokenizer.encode(prompt))

A thread cannot be stopped, so its input is bounded before (a text by the model's context). The limits here are for
requests that wait: each gets an answer in time, and the thread counts against its owner's share until it is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from ridgeline.serving import owner
from ridgeline.serving.errors import Unavailable
from ridgeline.serving.grammars.fair import FairPool, Full, Job

T = TypeVar("T")

PATIENCE = 30.0  # seconds that work may wait for its turn
SECONDS = 30.0  # and that it may take; the longest prompts take a few
MOST_EACH, MOST = 4096, 16_384  # work that may wait, of one owner and in all
RETRY_AFTER = 2  # seconds
# entries (tokens, each with its likeliest others) of the longest answer that is made within the event loop
INLINE_ENTRIES = 2048


class Busy(Unavailable):
    """There was no time for this work."""

    code = "server_busy"


class Shares:
    """Threads that owners share, of which each owner holds at most all but one, or at most `held`.

    patience, seconds: how long work may wait for its turn, and how long it may take then.
    """

    def __init__(
        self, threads: int, name: str, *, patience: float = PATIENCE, seconds: float = SECONDS, held: int | None = None
    ) -> None:
        self._pool = FairPool(threads, name, most_each=MOST_EACH, most=MOST, held=held)
        self._patience, self._seconds = patience, seconds

    async def run(self, work: Callable[[], T]) -> T:
        """Return the work's result. Raise Busy if it comes too late, and what the work raises."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        ours = partial(_deliver, loop, result, partial(copy_context().run, work))
        try:
            job = self._pool.submit(owner.current(), ours)
        except Full:
            raise Busy("too many texts wait to be read; try again later.", retry_after=RETRY_AFTER) from None
        try:
            await self._until_done(job, result)
            return result.result()
        finally:
            result.cancel()
            job.future.cancel()  # of a client that left: what has not begun never will
            del job, result, work, ours  # an error keeps this frame, and so would keep what the client sent

    async def _until_done(self, job: Job[None], result: asyncio.Future[T]) -> None:
        """Wait until the work is done. Raise Busy if it comes too late."""
        done, _ = await asyncio.wait([result], timeout=self._patience)
        if not done:
            if job.future.cancel():  # it has not begun
                message = f"there was no time to read the request within {self._patience:g} s; try again later."
                raise Busy(message, retry_after=RETRY_AFTER)
            done, _ = await asyncio.wait([result], timeout=self._seconds)
        if not done:
            raise Busy(f"reading the request took longer than {self._seconds:g} s, so it was ended; send less.")


def _deliver(loop: asyncio.AbstractEventLoop, result: asyncio.Future[T], work: Callable[[], T]) -> None:
    """Do the work in this thread, and end its future in the loop. `asyncio.wrap_future` would make futures that hold
    each other, and with them what the work returned, until the garbage collector comes."""
    try:
        value = work()
    except BaseException as error:
        loop.call_soon_threadsafe(_fail, result, error)
    else:
        loop.call_soon_threadsafe(_succeed, result, value)
    finally:
        del result, work


def _succeed(result: asyncio.Future[T], value: T) -> None:
    if not result.done():
        result.set_result(value)


def _fail(result: asyncio.Future[T], error: BaseException) -> None:
    if not result.done():
        result.set_exception(error)


TEXTS = Shares(5, "texts")
# Chat templates run in children (core/confined.py), so there are as many threads as children.
TEMPLATES = Shares(3, "templates")
# Large JSON. Its decoder holds the interpreter, so the event loop would wait for each further thread.
BODIES = Shares(2, "bodies")


async def off_loop(size: int, most: int, work: Callable[[], T]) -> T:
    """Return the work's result. The work is done here if its size is at most `most`, and otherwise in a thread."""
    return work() if size <= most else await BODIES.run(work)
